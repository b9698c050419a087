"""Functions of the offline task files in `data/lm_eval`: rows from a folder, prompts and metrics as `morph eval`'s.

The folder comes from the environment variable MORPH_EVAL_DATA or from `--metadata '{"data": "…"}'`; the package's
samples serve where it has the set. Importing this module registers `--model morph`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets

import morph.evaluate.lm_eval_adapter  # noqa: F401  (registers the model)
from morph.evaluate.forms import ASK, SUMMARISE, options, question_text, solved, squad_rows
from morph.evaluate.metrics import best_f1, exact_match, rouge
from morph.evaluate.sources import FolderSource, PackageSource, Source

TASKS = Path(__file__).parent / "data" / "lm_eval"
"""Folder of the task files."""


def _source(data: str | None) -> Source:
    folder = data or os.environ.get("MORPH_EVAL_DATA")
    return FolderSource(Path(folder)) if folder else PackageSource()


def _choices(name: str) -> Callable[..., dict[str, Any]]:
    def load(data: str | None = None, **_: Any) -> dict[str, Any]:
        rows = [
            {"id": str(r["id"]), "query": ASK[name](r), "choices": list(options(name, r)), "gold": int(r["answer"])}
            for r in _source(data).rows(name)
        ]
        return {"test": datasets.Dataset.from_list(rows)}

    return load


arc_challenge = _choices("arc_challenge")
hellaswag = _choices("hellaswag")
openbookqa = _choices("openbookqa")
boolq = _choices("boolq")


def squad(data: str | None = None, **_: Any) -> dict[str, Any]:
    """Questions about a passage, after solved examples."""
    asked, examples = squad_rows(_source(data).rows("squad"))
    before = solved(examples)
    rows = [
        {
            "id": str(r["id"]),
            "query": before + question_text(r, str(r["context"])),
            "references": list(map(str, r["answers"])),
        }
        for r in asked
    ]
    return {"test": datasets.Dataset.from_list(rows)}


def _summaries(name: str) -> Callable[..., dict[str, Any]]:
    _, word, _ = SUMMARISE[name]

    def load(data: str | None = None, **_: Any) -> dict[str, Any]:
        rows = [
            {
                "id": str(r["id"]),
                "query": f"{word}:\n{r['document']}\nSummary:",
                "references": list(r.get("summaries") or [r["summary"]]),
            }
            for r in _source(data).rows(name)
        ]
        return {"test": datasets.Dataset.from_list(rows)}

    return load


dialogsum = _summaries("dialogsum")
scitldr = _summaries("scitldr")


def judge_squad(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Exact match and F1."""
    return {"em": exact_match(results[0], doc["references"]), "f1": best_f1(results[0], doc["references"])}


def judge_summary(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """ROUGE-1, 2 and L."""
    return rouge(results[0].strip(), doc["references"])
