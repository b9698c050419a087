"""`morph distill` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from morph.cli.app import main
from tests.train.conftest import SETTINGS


def test_settings_are_shown(capsys: pytest.CaptureFixture[str], converted: Path) -> None:
    assert main(["distill", str(converted), "--set", "distill.lr=1e-3", "--show-config"]) == 0
    assert json.loads(capsys.readouterr().out)["distill"]["lr"] == 1e-3


def test_prepared_data_trains_and_the_folder_of_the_model_is_printed(
    capsys: pytest.CaptureFixture[str], converted: Path, texts: Path, tmp_path: Path
) -> None:
    shards, run = tmp_path / "shards", tmp_path / "run"
    assert main(["distill", str(converted), "--data", str(texts), "--prepare", str(shards), "--shard-size", "1MB"]) == 0
    assert "words: 60 documents" in capsys.readouterr().out
    few = [word for change in (*SETTINGS, "align.tokens=512") for word in ("--set", change)]
    words = ["distill", str(converted), "--data", str(shards), "--out", str(run), "--stage", "align", "--device", "cpu"]
    assert main([*words, *few]) == 0
    out = capsys.readouterr().out
    assert "align 2/2" in out and out.strip().endswith(str(run / "model")) and (run / "model" / "README.md").is_file()
    # The other stage goes on where the first ended.
    assert main([*words[:-4], "--stage", "distill", "--device", "cpu", *few, "--max-seconds", "1"]) == 0
    assert "goes on at distill step 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "there is no data to train on"),
        (["--data", "nowhere.txt"], 2, "no data at nowhere.txt; give a file, a folder, hf:NAME or recall"),
        (["--set", "x=1"], 2, "is not of the form section.key=value"),
        (["--config", "none.toml"], 2, "no configuration file none.toml"),
    ],
)
def test_wrong_use_is_named(
    words: list[str], code: int, message: str, converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["distill", str(converted), "--out", str(tmp_path / "run"), *words]) == code
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()
