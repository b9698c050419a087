"""The evaluation of gates: only the split that is named, claims whose value is the interval's upper end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import gate_eval
from benchmarks.claims import read_claims
from morph.gate.command import fit_command
from tests.gate.conftest import SMALL, Options


def test_gates_are_evaluated_on_the_eval_split_and_claims_are_readable(
    options: Options, requests_file: Path, tmp_path: Path
) -> None:
    out = fit_command(options(out=tmp_path / "out"), lambda _: None, SMALL)
    app = typer.Typer()
    app.command()(gate_eval.main)
    words = [str(out), "--requests", str(requests_file), "--results", str(tmp_path / "results"), "--name", "gates"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "results/gates.json").read_text())
    assert content["about"]["requests"] == 4 and content["about"]["split"] == "eval"
    assert content["eval"]["static_chain"]["4"] == pytest.approx(0, abs=1e-6)
    claims = {claim.id: claim for _, claim in read_claims(tmp_path / "results")}
    assert set(claims) == {
        f"model.r0.gate_vs_{what}.{name}.upper95"
        for name, whats in {
            "k1": ("shuffled", "static"), "k2": ("shuffled", "static"),
            "b25": ("shuffled", "static_length_aware"), "b50": ("shuffled", "static_length_aware"),
        }.items()
        for what in whats
    }  # fmt: skip
    ratio = content["eval"]["k2"]["vs_shuffled"]
    claim = claims["model.r0.gate_vs_shuffled.k2.upper95"]
    assert claim.value == ratio["high"] and claim.goal == "< 1" and ratio["low"] <= ratio["value"] <= ratio["high"]
