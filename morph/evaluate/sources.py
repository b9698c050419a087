"""Where rows of the evaluation sets come from: a local folder, the package's samples, or the Hugging Face hub.

Rows of every source have one schema per kind: multiple choice `{id, context?, question, choices[], answer}`, questions
`{id, title?, context, question, answers[]}`, summaries `{id, document, summary, summaries?[]}`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from morph.errors import CorruptFile, InvalidRequest

Row = dict[str, Any]

FILES = {
    "arc_challenge": "arc_challenge/test",
    "hellaswag": "hellaswag/validation",
    "boolq": "boolq/validation_passage",
    "squad": "squad_v1/dev",
    "dialogsum": "dialogsum/test",
    "scitldr": "scitldr/test",
    "openbookqa": "openbookqa/test",
    "kv75": "kv_retrieval/kv75",
    "qmsum_docs": "qmsum/test_docs",
    "qmsum": "qmsum/test_queries",
    "minilongbench": "minilongbench/test",
}
"""Set -> its file below the folder (or below its `eval/`), `.jsonl.gz` or `.jsonl`."""


class MissingData(InvalidRequest):
    """An evaluation set that is not there; the message says where it was looked for and what else to do."""


class Source(Protocol):
    """Rows by the name of their set."""

    @property
    def label(self) -> str:
        """What results say about where the data came from."""
        ...

    def rows(self, name: str) -> list[Row]:
        """All rows of a set.

        Raises:
            MissingData: the set is not there.
        """
        ...


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON-lines file, gzipped or not.

    Raises:
        CorruptFile: names the line that is no JSON object.
    """
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    rows = []
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise CorruptFile(f"{path}:{number} is no JSON object; restore the file")
                rows.append(row)
    except (OSError, EOFError, ValueError) as error:
        raise CorruptFile(f"{path} is not readable after {len(rows)} rows ({error}); restore the file") from error
    return rows


def in_fixed_order(rows: Iterable[Row]) -> list[Row]:
    """By the SHA-1 of the id: a shuffle that is the same everywhere, whatever order a source has."""

    def key(row: Row) -> str:
        if "id" not in row and "doc_id" not in row:
            raise CorruptFile(f"a row with the keys {sorted(row)} has no id; give every row one")
        return hashlib.sha1(str(row.get("id", row.get("doc_id"))).encode()).hexdigest()

    return sorted(rows, key=key)


class FolderSource:
    """Files below a folder."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise MissingData(f"--data {folder} is no folder; name one with the evaluation sets, or use --hub")
        self.folder = folder
        self.label = "folder"

    def rows(self, name: str) -> list[Row]:
        """See `Source.rows`."""
        stem = FILES[name]
        tried = [self.folder / part / f"{stem}{ending}" for part in ("eval", "") for ending in (".jsonl.gz", ".jsonl")]
        for path in tried:
            if path.is_file():
                return in_fixed_order(read_rows(path))
        raise MissingData(
            f"--data {self.folder} has no set {name!r}: neither eval/{stem}.jsonl.gz nor {stem}.jsonl.gz; "
            "put it there, leave the set out with --datasets, or use --hub"
        )


class PackageSource:
    """The samples that come with the package."""

    label = "package samples"

    def rows(self, name: str) -> list[Row]:
        """See `Source.rows`."""
        path = Path(str(resources.files("morph.evaluate") / "data" / "samples" / f"{name}.jsonl.gz"))
        if not path.is_file():
            raise MissingData(
                f"set {name!r} does not come with the package (its licence or size forbids it); give --data FOLDER "
                "or --hub"
            )
        return in_fixed_order(read_rows(path))


# ---- Hugging Face hub


def _hellaswag_text(text: str) -> str:
    """WikiHow's brackets taken out, as the harnesses do it (lm-eval's `hellaswag` task)."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _arc(row: Row, _: int) -> Row:
    labels = list(row["choices"]["label"])
    return {
        "id": row["id"],
        "question": row["question"],
        "choices": list(row["choices"]["text"]),
        "answer": labels.index(row["answerKey"]),
    }


def _hellaswag(row: Row, number: int) -> Row:
    context = row["ctx_a"] + " " + row["ctx_b"].capitalize()
    return {
        "id": f"hellaswag-val-{number}",
        "question": _hellaswag_text(row["activity_label"] + ": " + context),
        "choices": [_hellaswag_text(ending) for ending in row["endings"]],
        "answer": int(row["label"]),
    }


def _boolq(row: Row, number: int) -> Row:
    return {
        "id": f"boolq-{number}",
        "context": row["passage"],
        "question": row["question"],
        "choices": ["false", "true"],
        "answer": int(row["answer"]),
    }


def _squad(row: Row, _: int) -> Row:
    return {**{k: row[k] for k in ("id", "title", "context", "question")}, "answers": list(row["answers"]["text"])}


def _dialogsum(row: Row, _: int) -> Row:
    return {"id": row["id"], "document": row["dialogue"], "summary": row["summary"]}


def _scitldr(row: Row, _: int) -> Row:
    targets = list(row["target"])
    return {"id": row["paper_id"], "document": " ".join(row["source"]), "summary": targets[0], "summaries": targets}


def _openbookqa(row: Row, _: int) -> Row:
    return _arc({**row, "question": row["question_stem"]}, 0)


HUB: dict[str, tuple[str, str | None, str, Callable[[Row, int], Row]]] = {
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "test", _arc),
    "hellaswag": ("Rowan/hellaswag", None, "validation", _hellaswag),
    "boolq": ("google/boolq", None, "validation", _boolq),
    "squad": ("rajpurkar/squad", None, "validation", _squad),
    "dialogsum": ("knkarthick/dialogsum", None, "test", _dialogsum),
    "scitldr": ("allenai/scitldr", "Abstract", "test", _scitldr),
    "openbookqa": ("allenai/openbookqa", "main", "test", _openbookqa),
}
"""Set -> repository, configuration, split, and the map to this module's schema."""


class HubSource:
    """Data sets of the Hugging Face hub, through the package `datasets` and its cache."""

    label = "Hugging Face hub"

    def rows(self, name: str) -> list[Row]:
        """See `Source.rows`."""
        if name not in HUB:
            raise MissingData(f"set {name!r} is not read from the hub; give --data FOLDER with it")
        try:
            import datasets
        except ImportError as error:
            raise MissingData("--hub needs the package `datasets`: pip install 'morph-hybrid[eval]'") from error
        repository, config, split, convert = HUB[name]
        try:
            loaded = datasets.load_dataset(repository, config, split=split)
        except Exception as error:  # the library raises a dozen types without a common base for "no network"
            raise MissingData(
                f"set {name!r} ({repository}) could not be loaded from the hub: {type(error).__name__}: {error}; "
                "check the network, or give --data FOLDER with local files"
            ) from error
        return in_fixed_order(convert(dict(row), number) for number, row in enumerate(loaded))
