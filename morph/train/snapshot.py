"""Checkpoints of a run on disk: whole or not there, the newest few kept."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from morph.checkpoint.hf_folder import read_json
from morph.convert.folder import explain_full_disk
from morph.errors import CorruptFile

STAGES = ("align", "distill")


@dataclass
class Position:
    """Where a run is; with the tensors and the configuration it determines everything that follows.

    Attributes:
        stage: `align` or `distill`. step: next step of it. begin: step that the stage began with in this run.
        updates: optimiser updates made in the stage.
        drawn: tokens drawn from each source in the stage.
        ranking: free blocks by sensitivity, the most sensitive first; empty before the first measurement.
        tokens: token passes trained on in this run, both stages.
        model: fingerprint of the model. config: settings of the run.
    """

    stage: str
    step: int
    begin: int
    updates: int
    drawn: dict[str, int]
    ranking: list[int]
    tokens: int
    model: str
    config: dict[str, Any] = field(default_factory=dict)

    def order(self) -> tuple[int, int]:
        """For sorting: stage, then step."""
        return STAGES.index(self.stage), self.step


def save_snapshot(folder: Path, position: Position, tensors: dict[str, torch.Tensor], keep: int) -> Path:
    """Write a checkpoint and drop the oldest beyond `keep`.

    Raises:
        MorphError: the disk is full; the checkpoints from before are still there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{position.stage}-{position.step:07d}"
    partial = folder / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with explain_full_disk(folder, sum(t.nbytes for t in tensors.values())):
            partial.mkdir()
            save_file(
                {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial / "state.safetensors"
            )
            (partial / "position.json").write_text(json.dumps(asdict(position), indent=1) + "\n", encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for old in snapshots(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def snapshots(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [path for path in folder.glob("*-*") if (path / "position.json").is_file()] if folder.is_dir() else []
    return sorted(found, key=lambda path: (STAGES.index(path.name.split("-")[0]), int(path.name.split("-")[1])))


def load_snapshot(path: Path) -> tuple[Position, dict[str, torch.Tensor]]:
    """Read a checkpoint.

    Raises:
        CorruptFile: damaged.
    """
    remedy = f"remove {path} to go on from the one before"
    try:
        position = Position(**read_json(path / "position.json", remedy))
        return position, load_file(path / "state.safetensors")
    except (SafetensorError, OSError, TypeError) as error:
        raise CorruptFile(f"checkpoint {path} cannot be read ({error}); {remedy}") from error
