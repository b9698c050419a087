"""A folder of small sets, and a tiny model with room for their long forms."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_model

WORDS = "river bridge boat evening lamp table garden window stone paper north summer letter market".split()  # noqa: SIM905


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_sets(folder: Path, rows: int = 12) -> Path:
    """ARC, BoolQ, SQuAD and SciTLDR in the folder's `eval/`, a few short rows each."""
    rng = random.Random(0)
    arc, boolq, squad, scitldr = [], [], [], []
    for i in range(rows):
        choices = [sentence(rng, 2) for _ in range(4)]
        arc.append({"id": f"a{i}", "question": sentence(rng, 4), "choices": choices, "answer": i % 4})
        passage = sentence(rng, 8)
        boolq.append({"id": f"b{i}", "context": passage, "question": sentence(rng, 3), "choices": [], "answer": i % 2})
        squad.append(
            {
                "id": f"q{i}",
                "title": f"t{i}",
                "context": passage,
                "question": sentence(rng, 3),
                "answers": [passage.split()[0]],
            }
        )
        scitldr.append({"id": f"s{i}", "document": passage, "summary": sentence(rng, 3), "summaries": [passage[:20]]})
    write_rows(folder / "eval/arc_challenge/test.jsonl.gz", arc)
    write_rows(folder / "eval/boolq/validation_passage.jsonl.gz", boolq)
    write_rows(folder / "eval/squad_v1/dev.jsonl.gz", squad)
    write_rows(folder / "eval/scitldr/test.jsonl.gz", scitldr)
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sets(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("roomy") / "tiny", max_context=1024)
