"""Sets come from where they are, and what is missing is named with a remedy."""

from __future__ import annotations

import gzip
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from morph.errors import CorruptFile
from morph.evaluate.sources import FILES, HUB, FolderSource, HubSource, MissingData, PackageSource, in_fixed_order
from tests.evaluate.conftest import write_rows


def test_a_folder_gives_its_sets_in_an_order_of_its_own(data_folder: Path) -> None:
    rows = FolderSource(data_folder).rows("arc_challenge")
    assert [r["id"] for r in rows] == [r["id"] for r in in_fixed_order(rows[::-1])]
    assert len(rows) == 12 and [r["id"] for r in rows] != [f"a{i}" for i in range(12)]
    # The folder above `eval`, or `eval` itself.
    assert FolderSource(data_folder / "eval").rows("arc_challenge") == rows


def test_a_missing_set_names_both_places_and_the_remedy(data_folder: Path) -> None:
    with pytest.raises(MissingData, match=r"hellaswag/validation.*--datasets.*--hub"):
        FolderSource(data_folder).rows("hellaswag")
    with pytest.raises(MissingData, match="no folder"):
        FolderSource(data_folder / "nowhere")


def test_a_damaged_file_is_named_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "arc_challenge/test.jsonl.gz"
    write_rows(path, [{"id": "a", "question": "q"}] * 50)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptFile, match=r"test\.jsonl\.gz"):
        FolderSource(tmp_path).rows("arc_challenge")
    path.write_bytes(gzip.compress(b'{"id": 1}\n{"id": \n'))
    with pytest.raises(CorruptFile, match="after 1 rows"):
        FolderSource(tmp_path).rows("arc_challenge")
    path.write_bytes(gzip.compress(b'{"question": 1}\n'))
    with pytest.raises(CorruptFile, match="no id"):
        FolderSource(tmp_path).rows("arc_challenge")


def test_the_package_has_its_samples_and_says_what_it_has_not() -> None:
    for name in ("hellaswag", "openbookqa", "scitldr"):
        assert len(PackageSource().rows(name)) >= 60
    with pytest.raises(MissingData, match="does not come with the package"):
        PackageSource().rows("dialogsum")


def fake_datasets(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


HUB_ROWS: dict[str, dict[str, Any]] = {
    "arc_challenge": {
        "id": "x", "question": "q", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2",
    },
    "hellaswag": {
        "activity_label": "Run", "ctx_a": "He [step] runs.", "ctx_b": "he", "endings": ["now [title] stops", "goes"],
        "label": "1",
    },
    "boolq": {"passage": "p", "question": "q", "answer": True},
    "squad": {"id": "x", "title": "t", "context": "c", "question": "q", "answers": {"text": ["a"]}},
    "dialogsum": {"id": "x", "dialogue": "d", "summary": "s"},
    "scitldr": {"paper_id": "x", "source": ["a", "b"], "target": ["s", "t"]},
    "openbookqa": {
        "id": "x", "question_stem": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_rows_of_the_hub_get_the_schema_of_the_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*args: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((args, options))
        return [HUB_ROWS[name]]

    fake_datasets(monkeypatch, load)
    (row,) = HubSource().rows(name)
    assert asked == [((HUB[name][0], HUB[name][1]), {"split": HUB[name][2]})]
    assert row["id"] and name in FILES
    if "choices" in row:
        assert row["answer"] in range(len(row["choices"]))
    if name == "hellaswag":
        assert row["question"] == "Run: He runs. He" and row["choices"] == ["now. stops", "goes"]
    if name == "arc_challenge":
        assert row["answer"] == 1
    if name == "scitldr":
        assert row["document"] == "a b" and row["summaries"] == ["s", "t"]


def test_no_network_says_so_and_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise ConnectionError("name resolution failed")

    fake_datasets(monkeypatch, load)
    with pytest.raises(MissingData, match=r"name resolution failed.*network.*--data"):
        HubSource().rows("squad")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingData, match=r"morph-hybrid\[eval\]"):
        HubSource().rows("squad")
