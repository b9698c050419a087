"""The shipped model is as good as it was when its quick suite was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.claims import RESULTS
from morph.evaluate.plan import Options
from morph.evaluate.run import run_evaluation
from morph.evaluate.summary import scores

LAYOUTS = ("ssm", "auto:0.5")
"""The mixers and the gates: one score each; that the base is the base is tested by itself."""


def recorded(revision: str) -> dict[str, Any]:
    """The quick suite's summary in the results, of this revision."""
    path = RESULTS / f"eval_quick_{revision}.json"
    if not path.exists():
        pytest.fail(f"{path.name} is not among the results; record it: python -m benchmarks.eval_suite --suite quick")
    summary: dict[str, Any] = json.loads(path.read_text())["summary"]
    return summary


def losses(now: dict[str, Any], before: dict[str, Any]) -> dict[str, str]:
    """Layouts whose score lies below the recorded interval."""
    return {
        layout: f"{now[layout]['value']} < {before[layout]['low']}"
        for layout in LAYOUTS
        if now[layout]["value"] < before[layout]["low"]
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_shipped_models_quick_score_has_not_dropped(shipped_model: Path, tmp_path: Path) -> None:
    revision = str(json.loads((shipped_model / "config.json").read_text())["revision"])
    before = recorded(revision)
    assert before["about"]["suite"] == "quick" and before["about"]["dtype"] == "bfloat16"
    found = run_evaluation(
        Options(str(shipped_model), suite="quick", layouts=",".join(LAYOUTS), out=tmp_path / "quick")
    )
    assert {part.dataset.name: len(part.items) for part in found.parts} == {
        name: entry["items"] for name, entry in before["sets"].items()
    }, "other items than those that were recorded"
    assert losses(scores(found), before["scores"]) == {}


def test_a_score_below_its_interval_is_a_loss() -> None:
    before = {layout: {"value": 30.0, "low": 25.0, "high": 35.0} for layout in LAYOUTS}
    assert losses(before, before) == {}
    worse = before | {"ssm": {"value": 24.9, "low": 20.0, "high": 30.0}}
    assert losses(worse, before) == {"ssm": "24.9 < 25.0"}
