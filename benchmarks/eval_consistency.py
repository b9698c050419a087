"""Same checkpoint, same inputs, other ways of running: how often answers, choices and layouts are equal.

    python -m benchmarks.eval_consistency smollm2-135m --hf smollm2-hf --data DATA --limit 50

Against the engine in float32, batched: the same one request at a time, in bfloat16, on the GPU with `--cuda`; and, for
all attention, transformers on the dequantised base (`benchmarks/peers/dequantise.py`) through lm-eval's `hf`, against
the engine on that same folder. Greedy answers; choices by log probability.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.claims import RESULTS
from benchmarks.report import header, installed, write_results
from morph.evaluate.metrics import choose
from morph.evaluate.plan import Evaluation, Options, Part
from morph.evaluate.run import run_evaluation
from morph.evaluate.store import Record

SETS = ("hellaswag", "scitldr", "openbookqa_long", "scitldr_long")
REFERENCE = "float32 batched"


def variants(options: Options, cuda: bool) -> dict[str, Options]:
    """Ways to run, by name; each keeps its items in its own folder."""
    found = {
        REFERENCE: replace(options, dtype="float32"),
        "float32 solo": replace(options, dtype="float32", max_requests=1),
        "bfloat16 batched": options,
        "bfloat16 solo": replace(options, max_requests=1),
    }
    if cuda:
        found["bfloat16 cuda"] = replace(options, device="cuda")
    return {name: replace(one, out=options.out / name.replace(" ", "-")) for name, one in found.items()}


def equal(part: Part, ours: dict[str, Record], theirs: dict[str, Record]) -> dict[str, float]:
    """Rates of equal answers (or choices) and of equal layouts, and over the items whose layouts are equal."""
    same, layouts = [], []
    for item in part.items:
        a, b = ours[item.id], theirs[item.id]
        if part.dataset.scored:
            same.append(choose(a["logprobs"]) == choose(b["logprobs"]))
        else:
            same.append(a["answer"] == b["answer"])
        layouts.append(a["layout"] == b["layout"])
    alike = [s for s, layout in zip(same, layouts, strict=True) if layout]
    return {
        "items": len(same),
        "equal_answers": round(sum(same) / len(same), 4),
        "equal_layouts": round(sum(layouts) / len(layouts), 4),
        "equal_answers_of_equal_layouts": round(sum(alike) / len(alike), 4) if alike else float("nan"),
    }


def transformers_records(folder: Path, evaluation: Evaluation, tokenizer: Any) -> dict[str, dict[str, Record]]:
    """The same items by lm-eval's `hf` model in float32."""
    from types import SimpleNamespace

    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4)
    found: dict[str, dict[str, Record]] = {}
    for part in evaluation.parts:
        layout = "1" * evaluation.config.num_blocks
        mine = found.setdefault(part.dataset.name, {})
        for item, prompt in zip(part.items, part.prompts, strict=True):
            if part.dataset.scored:
                asks = [SimpleNamespace(args=(item.prompt, " " + choice)) for choice in item.choices]
                scores = model.loglikelihood(asks, disable_tqdm=True)
                mine[item.id] = {"layout": layout, "logprobs": [value for value, _ in scores]}
            else:
                text = tokenizer.decode(prompt, skip_special_tokens=False)
                options = {"until": list(item.stop), "max_gen_toks": item.max_tokens, "do_sample": False}
                (answer,) = model.generate_until([SimpleNamespace(args=(text, options))], disable_tqdm=True)
                mine[item.id] = {"layout": layout, "answer": answer}
    return found


def main(
    model: Annotated[str, typer.Argument(help="Name or folder of a model with gates.")] = "smollm2-135m",
    hf: Annotated[Path | None, typer.Option("--hf", help="Hugging Face folder of the dequantised base.")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Folder with sets; default: package samples.")] = None,
    datasets: Annotated[str, typer.Option("--datasets", help="Sets, comma-separated.")] = ",".join(SETS),
    limit: Annotated[int, typer.Option("--limit", min=1, help="Items of each set.")] = 20,
    cuda: Annotated[bool, typer.Option("--cuda", help="Add the GPU.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder of finished items.")] = Path("eval-consistency"),
    results: Annotated[Path, typer.Option("--results", help="Folder for the JSON file.")] = RESULTS,
) -> None:
    """Run each way, and tabulate how often it agrees with the reference."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    console = Console(width=140)
    options = Options(
        model,
        suite="quick",
        datasets=tuple(name for name in datasets.split(",") if name),
        layouts="attention,auto:0.5",
        data=data,
        limit=limit,
        out=out,
    )
    report: dict[str, Any] = {}
    runs = {name: run_evaluation(one, console.print) for name, one in variants(options, cuda).items()}
    reference = runs[REFERENCE]
    for name, run in runs.items():
        if name == REFERENCE:
            continue
        report[name] = {
            layout: {
                part.dataset.name: equal(
                    part, run.records[part.dataset.name][layout], reference.records[part.dataset.name][layout]
                )
                for part in reference.parts
            }
            for layout in ("attention", "auto:0.5")
        }
    if hf is not None:
        from morph.checkpoint import open_model
        from morph.checkpoint.tokenizer import load_tokenizer

        same = replace(options, model=str(hf), dtype="float32", layouts="attention", out=out / "hf-folder")
        ours = run_evaluation(same, console.print)
        theirs = transformers_records(hf, ours, load_tokenizer(open_model(hf).tokenizer_dir))
        report["transformers float32 (same folder)"] = {
            "attention": {
                part.dataset.name: equal(part, theirs[part.dataset.name], ours.records[part.dataset.name]["attention"])
                for part in ours.parts
            }
        }
    table = Table("run", "layout", "set", "items", "equal answers", "equal layouts", "… of equal layouts")
    for name, layouts in report.items():
        for layout, sets in layouts.items():
            for set_, row in sets.items():
                cells = [f"{row[k]:.1%}" for k in ("equal_answers", "equal_layouts", "equal_answers_of_equal_layouts")]
                table.add_row(name, layout, set_, str(row["items"]), *cells)
    console.print(table)
    exact = [row["equal_answers"] for sets in report["float32 solo"].values() for row in sets.values()]
    content = header()
    content["versions"] |= installed(sys.executable, ("lm_eval",))
    content |= {
        "about": {"reference": REFERENCE, "answers": "greedy; choices by log probability"},
        "consistency": report,
        "claims": [{"id": "eval.consistency.float32_solo.equal_answers.min", "value": min(exact), "goal": ">= 0.99"}],
    }
    console.print(f"written to {write_results(results, 'eval_consistency', content)}")


if __name__ == "__main__":
    typer.run(main)
