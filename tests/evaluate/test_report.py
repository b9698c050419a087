"""The report is one page that needs nothing else."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from morph.cli.app import main
from morph.errors import CorruptFile, InvalidRequest, UnsupportedModel
from morph.evaluate.claims import Claim
from morph.evaluate.report import build_report

pytest.importorskip("matplotlib")

VOID = {"meta", "br", "link", "img", "hr"}


class Checker(HTMLParser):
    """Counts tags, and finds what would need a script or another file."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: dict[str, int] = {}
        self.outside: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.outside.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def evaluation(roomy_model: Path, data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "six-run"
    words = [
        "eval", str(roomy_model), "--suite", "six", "--datasets", "arc_challenge,scitldr_long", "--limit", "3",
        "--data", str(data_folder), "--layouts", "attention,ssm,auto:0.5", "--lengths", "200-350", "--out", str(out),
    ]  # fmt: skip
    assert main(words) == 0
    return out


def results(folder: Path) -> Path:
    folder.mkdir()
    content = {
        "machine": {"cpu": "some <cpu>", "flags": {}},
        "versions": {"torch": "2"},
        "command": "python -m benchmarks.speed --x '<y>'",
        "date": "2026-01-01",
        "about": {"unit": "points"},
        "claims": [
            {"id": "server.throughput.x", "value": 2.5, "goal": ">= 2"},
            {"id": "eval.quick.low", "value": 0.5, "goal": ">= 1"},
        ],
    }
    (folder / "speed.json").write_text(json.dumps(content))
    return folder


def test_the_page_is_whole_and_self_contained(evaluation: Path, tmp_path: Path) -> None:
    page = build_report(results(tmp_path / "results"), [evaluation])
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert "script" not in checker.tags and checker.outside == []
    assert checker.tags["svg"] == 5 and checker.tags["h1"] == 1
    text = " ".join(checker.text)
    for expected in (
        "1 of 2 claims are met", "server.throughput.x", "up to 3.87×", "not measured yet", "six-run", "scitldr_long",
        "python -m benchmarks.speed --x '<y>'", "some <cpu>", "How to reproduce", "FLOPs saved",
    ):  # fmt: skip
        assert expected in text, expected
    # Our figure stands beside the paper's.
    row = page[page.index("up to 3.87×") :]
    assert "server.throughput.x = 2.5" in row[: row.index("</tr>")]


def test_a_result_file_with_a_summary_is_an_evaluation_too(evaluation: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    summary = json.loads((evaluation / "results.json").read_text())
    (folder / "eval_quick.json").write_text(json.dumps({"summary": summary, "claims": []}))
    assert "Evaluation: eval_quick" in build_report(folder, [])


def test_what_cannot_be_reported_is_named(evaluation: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nothing to report"):
        build_report(None, [])
    with pytest.raises(InvalidRequest, match="not finished"):
        build_report(None, [tmp_path])
    (tmp_path / "results.json").write_text('{"about": {}}')
    with pytest.raises(UnsupportedModel, match="has version None"):
        build_report(None, [tmp_path])
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(CorruptFile, match=r"bad\.json"):
        build_report(tmp_path, [])
    assert main(["report", "--results", str(tmp_path / "nowhere")]) == 2
    assert main(["report", "--eval", str(evaluation), "--out", str(tmp_path / "no" / "page.html")]) == 2


def test_the_command_writes_the_page(evaluation: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    folder = results(tmp_path / "results")
    assert main(["report", "--results", str(folder), "--eval", str(evaluation), "--out", str(target)]) == 0
    assert target.read_text().startswith("<!doctype html>")


def test_a_goal_is_a_comparison() -> None:
    assert Claim("a", 0.2, "<= 0.2").met and not Claim("a", 0.21, "<= 0.2").met
    with pytest.raises(ValueError, match="write one of"):
        _ = Claim("a", 1, "about 2").met
