"""The shipped model is as good as it was when its quick suite was recorded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.claims import RESULTS
from morph.evaluate.plan import Options
from morph.evaluate.run import run_evaluation
from morph.evaluate.summary import scores

LAYOUTS = ("ssm", "auto:0.5")
"""The mixers and the gates: one score each; that the base is the base is tested by itself."""


SETS = ("hellaswag", "openbookqa", "scitldr", "passkey_made")
"""Those of the quick suite whose prompts are short: the long ones take most of its time."""


def recorded(revision: str) -> dict[str, Any]:
    """The quick suite's summary in the results, of this revision."""
    path = RESULTS / f"eval_quick_{revision}.json"
    if not path.exists():
        pytest.fail(f"{path.name} is not among the results; record it: python -m benchmarks.eval_suite --suite quick")
    summary: dict[str, Any] = json.loads(path.read_text())["summary"]
    return summary


def least(before: dict[str, Any], layout: str) -> float:
    """Lower end of the recorded interval of the mean over `SETS`: their distances to their own lower ends, combined."""
    found = [before["sets"][name]["layouts"][layout]["metrics"][before["sets"][name]["primary"]] for name in SETS]
    below = math.sqrt(sum((one["value"] - one["low"]) ** 2 for one in found)) / len(found)
    return sum(one["value"] for one in found) / len(found) - below


def losses(now: dict[str, Any], before: dict[str, Any]) -> dict[str, str]:
    """Layouts whose score lies below the recorded interval."""
    return {
        layout: f"{now[layout]['value']} < {least(before, layout):.3f}"
        for layout in LAYOUTS
        if now[layout]["value"] < least(before, layout)
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_shipped_models_quick_score_has_not_dropped(shipped_model: Path, tmp_path: Path) -> None:
    revision = str(json.loads((shipped_model / "config.json").read_text())["revision"])
    before = recorded(revision)
    assert before["about"]["suite"] == "quick" and before["about"]["dtype"] == "bfloat16"
    found = run_evaluation(
        Options(str(shipped_model), suite="quick", datasets=SETS, layouts=",".join(LAYOUTS), out=tmp_path / "quick")
    )
    assert {part.dataset.name: len(part.items) for part in found.parts} == {
        name: before["sets"][name]["items"] for name in SETS
    }, "other items than those that were recorded"
    assert losses(scores(found), before) == {}


def test_a_score_below_its_interval_is_a_loss() -> None:
    entry = {
        "primary": "acc",
        "layouts": {name: {"metrics": {"acc": {"value": 30.0, "low": 20.0}}} for name in LAYOUTS},
    }
    before = {"sets": {name: entry for name in SETS}}
    assert least(before, "ssm") == pytest.approx(30 - 10 / math.sqrt(len(SETS)))
    good = {layout: {"value": 25.1} for layout in LAYOUTS}
    assert losses(good, before) == {}
    assert list(losses(good | {"ssm": {"value": 24.0}}, before)) == ["ssm"]
