"""A suite of `morph eval` as a result file: figures of every set and layout, and the claims that they support.

    python -m benchmarks.eval_suite smollm2-135m --suite six --data DATA --out eval-six-r1
    python -m benchmarks.eval_suite smollm2-135m --suite quick --out eval-quick-r1

Takes the options of `morph eval` that matter here; a stopped run goes on with the same `--out`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from benchmarks.claims import RESULTS
from benchmarks.report import header, installed, write_results
from morph.evaluate.command import evaluate, show
from morph.evaluate.plan import Options
from morph.evaluate.report import published

SIX_GOAL, PAIRS_GOAL = 5, 13
"""Of 6 long sets not inferior to the base at budget 0.5; of 18 pairs of set and budget at least as good as static."""

PUBLIC_GAP, PUBLIC_ITEMS = 2.5, 1000
"""Points that the base may be away from a public figure: the interval of this many items, and another quantisation."""


def claims_of(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """What the suite supports; the six sets' goals only where all six long forms were run."""
    about = summary["about"]
    prefix = f"eval.{about['suite'].removesuffix('-long')}.{about['revision'] or about['model']}"
    claims: list[dict[str, Any]] = [
        {
            "id": f"eval.base.{figure['set']}.{figure['metric']}.public_gap_points",
            "value": round(abs(ours["value"] - figure["value"]), 3),
            "goal": f"<= {PUBLIC_GAP}",
            "here": ours,
            "public": figure,
        }
        for figure in published()["base"]["figures"]
        if str(about["model"]).startswith(figure["model"])
        and summary["sets"].get(figure["set"], {}).get("items", 0) >= PUBLIC_ITEMS
        for ours in [summary["sets"][figure["set"]]["layouts"]["attention"]["metrics"][figure["metric"]]]
    ]
    longs = [name for name in summary["sets"] if name.endswith("_long")]
    entry = summary["not_inferior"].get("auto:0.5")
    if entry is not None and len(longs) == 6:
        kept = {name: row for name, row in entry["sets"].items() if name in longs}
        claims.append(
            {
                "id": f"{prefix}.not_inferior.b50",
                "value": sum(row["not_inferior"] for row in kept.values()),
                "goal": f">= {SIX_GOAL}",
                "of": len(kept),
            }
        )
    pairs = [pair for pair in summary["auto_vs_static"] if pair["set"] in longs]
    if len(pairs) == 18:
        claims.append(
            {
                "id": f"{prefix}.auto_vs_static.pairs",
                "value": sum(pair["at_least_as_good"] for pair in pairs),
                "goal": f">= {PAIRS_GOAL}",
                "of": len(pairs),
                "significantly_better": sum(p["significant"] and p["difference"]["value"] > 0 for p in pairs),
                "significantly_worse": sum(p["significant"] and p["difference"]["value"] < 0 for p in pairs),
            }
        )
    for name in longs if len(longs) == 6 else []:
        figures = summary["sets"][name]["layouts"].get("auto:0.5")
        if figures is not None:
            claims.append({"id": f"{prefix}.flops_saved.b50.{name}", "value": figures["flops_saved"], "goal": "> 0"})
    return claims


def main(
    model: Annotated[str, typer.Argument(help="Name or folder of a model.")] = "smollm2-135m",
    suite: Annotated[Literal["quick", "six", "six-short", "six-long", "long"], typer.Option("--suite")] = "quick",
    layouts: Annotated[str | None, typer.Option("--layouts", help="As of `morph eval`.")] = None,
    datasets: Annotated[str, typer.Option("--datasets", help="Only these sets, comma-separated.")] = "",
    data: Annotated[Path | None, typer.Option("--data", help="Folder with the sets.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Items of each set.")] = None,
    ranking: Annotated[str | None, typer.Option("--ranking", help="As of `morph eval`.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of finished items.")] = Path("eval-results"),
    answer_loss: Annotated[bool, typer.Option("--answer-loss", help="As of `morph eval`.")] = False,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option("--dtype")] = "bfloat16",
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device")] = "cpu",
    max_requests: Annotated[int, typer.Option("--max-requests", min=1)] = 16,
    results: Annotated[Path, typer.Option("--results", help="Folder for the JSON file.")] = RESULTS,
    name: Annotated[str | None, typer.Option("--name", help="Of the file; default: eval_SUITE_REVISION.")] = None,
) -> None:
    """Run a suite, and write its figures with what made them."""
    options = Options(
        model=model,
        suite=suite,
        layouts=layouts,
        datasets=tuple(part for part in datasets.split(",") if part),
        data=data,
        limit=limit,
        ranking=ranking,
        out=out,
        dtype=dtype,
        device=device,
        max_requests=max_requests,
        answer_loss=answer_loss,
    )
    console = Console(width=160)
    summary = evaluate(options, Console(stderr=True))
    show(summary, console)
    content = header()
    content["versions"] |= installed(sys.executable, ("rouge_score",))
    if device == "cuda":
        import torch

        content["machine"]["gpu"] = torch.cuda.get_device_name()
    content |= {"about": summary["about"], "summary": summary, "claims": claims_of(summary)}
    about = summary["about"]
    file = name or f"eval_{suite.replace('-', '_')}_{about['revision'] or about['model']}"
    console.print(f"written to {write_results(results, file, content)}")


if __name__ == "__main__":
    typer.run(main)
