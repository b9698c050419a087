"""The base in Morph against lm-eval's own `hf` model: the same tasks, items and weights, offline.

    python benchmarks/peers/dequantise.py base/SmolLM2-135M-Instruct.Q4_1.gguf smollm2-hf
    python -m benchmarks.eval_parity smollm2-hf --data DATA --limit 500

Both read the Hugging Face folder of the dequantised base, in float32. `--model NAME` adds the model as users run it
(bfloat16, all attention) for comparison; it is no part of the claim, since its weights' KV is rounded.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.claims import RESULTS
from benchmarks.report import header, installed, write_results

TASKS = ("arc_challenge", "hellaswag", "boolq", "openbookqa", "squad", "dialogsum", "scitldr")
WRITTEN = ("squad", "dialogsum", "scitldr")
BOUND = 0.2
"""Points of 100 that the two may differ by."""


def run(model: str, arguments: dict[str, Any], task: str, limit: int | None, data: Path | None) -> dict[str, Any]:
    """Metrics in points of 100, and what each item got, by lm-eval."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    from morph.evaluate.lm_eval_tasks import TASKS as FOLDER

    metadata = {"data": str(data)} if data else {}
    config = load_yaml(FOLDER / f"morph_{task}.yaml", resolve_func=True)
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[config],
        limit=limit,
        batch_size=8,
        device="cpu",
        bootstrap_iters=0,
        task_manager=TaskManager(metadata=metadata, include_defaults=False),
        verbosity="ERROR",
    )
    samples = found["samples"][f"morph_{task}"]
    metrics = [key for key in samples[0] if key in ("acc", "acc_norm", "em", "f1", "rouge1", "rouge2", "rougeL")]
    return {
        "items": len(samples),
        "metrics": {name: 100 * sum(row[name] for row in samples) / len(samples) for name in metrics},
        "per_item": {name: [row[name] for row in samples] for name in metrics},
    }


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Per metric: both figures, their difference in points and how many items got another value."""
    return {
        name: {
            "hf": round(value, 3),
            "morph": round(ours["metrics"][name], 3),
            "difference": round(ours["metrics"][name] - value, 3),
            "items_that_differ": sum(
                abs(a - b) > 1e-9 for a, b in zip(ours["per_item"][name], theirs["per_item"][name], strict=True)
            ),
        }
        for name, value in theirs["metrics"].items()
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Hugging Face folder of the dequantised base.")],
    data: Annotated[Path | None, typer.Option("--data", help="Folder with the sets; default: package samples.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Items of each multiple-choice set.")] = None,
    written: Annotated[int, typer.Option("--written", min=1, help="Items of each set with written answers.")] = 100,
    tasks: Annotated[str, typer.Option("--tasks", help="Comma-separated.")] = ",".join(TASKS),
    model: Annotated[str | None, typer.Option("--model", help="A Morph model beside, in bfloat16.")] = None,
    add: Annotated[bool, typer.Option("--add", help="Keep the other tasks of the stored result.")] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder for the JSON file.")] = RESULTS,
) -> None:
    """Compare the figures of both models on the same items, and say whether they agree."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    table = Table("task, metric", "items", "hf", "morph", "difference", "items that differ")
    content = header()
    stored = results / "eval_parity.json"
    before = json.loads(stored.read_text()) if add and stored.exists() else {}
    report: dict[str, Any] = before.get("parity", {})
    beside: dict[str, Any] = before.get("as_served_bfloat16", {})
    for entry in report.values():
        entry.setdefault("command", before["command"])
    for task in (name.strip() for name in tasks.split(",")):
        count = written if task in WRITTEN else limit
        theirs = run("hf", {"pretrained": str(folder), "dtype": "float32"}, task, count, data)
        ours = run("morph", {"pretrained": str(folder), "dtype": "float32"}, task, count, data)
        report[task] = {
            "items": ours["items"],
            "metrics": compare(ours, theirs),
            "command": content["command"],
        }
        if model:
            used = run("morph", {"pretrained": model, "layout": "attention"}, task, count, data)
            beside[task] = {name: round(value, 3) for name, value in used["metrics"].items()}
        for name, row in report[task]["metrics"].items():
            cells = [f"{row[key]:.2f}" for key in ("hf", "morph", "difference")]
            table.add_row(f"{task} {name}", str(ours["items"]), *cells, str(row["items_that_differ"]))
    Console(width=120).print(table)
    worst = max(abs(row["difference"]) for entry in report.values() for row in entry["metrics"].values())
    content["versions"] |= installed(sys.executable, ("lm_eval", "rouge_score", "datasets"))
    content |= {
        "about": {
            "weights": "dequantised base as a Hugging Face folder, float32 in both",
            "unit": "points of 100",
            "layout": "attention",
        },
        "parity": report,
        "as_served_bfloat16": beside,
        "claims": [{"id": "eval.lm_eval_parity.max_points", "value": worst, "goal": f"<= {BOUND}"}],
    }
    print(f"written to {write_results(results, 'eval_parity', content)}")


if __name__ == "__main__":
    typer.run(main)
