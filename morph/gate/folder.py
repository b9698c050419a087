"""Writing gates and cost tables into a model folder: the old ones stay until the new ones are complete."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from morph.errors import InvalidRequest, UnsupportedModel
from morph.gate.cost import CostTable
from morph.hub.pull import MARKER

GATES, COST, CONFIG = "gate.safetensors", "cost.json", "config.json"


def check_model(folder: Path, meta: dict[str, Any], adaptive: bool) -> None:
    """Refuse a model that can have no gates.

    Raises:
        UnsupportedModel: not a Morph folder, or no block has both mixers.
    """
    if meta.get("model_type") != "morph" or not folder.is_dir() or not adaptive:
        raise UnsupportedModel(
            f"{folder.name} has no block with both mixers, so there is nothing for a gate to choose; "
            "make a hybrid of it first (morph convert, morph distill)"
        )


def check_target(folder: Path, out: Path | None) -> Path:
    """Where the result goes; checked before any long work.

    Args:
        folder: the model. out: where a copy with the new gates goes; None = the model's own folder.

    Raises:
        InvalidRequest: it cannot be written, holds something already, or is a pulled model.
    """
    if out is None:
        if (folder / MARKER).exists():
            raise InvalidRequest(
                f"{folder.name} is a pulled model, which is kept as it was published; give --out DIR for a copy with "
                "the new gates"
            )
        target = folder.resolve()
    else:
        target = out.absolute()
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InvalidRequest(f"--out {out} exists already; name a new folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if out is None and not os.access(target, os.W_OK):
            raise PermissionError(13, "Permission denied")
        Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent)).rmdir()
    except OSError as error:
        raise InvalidRequest(
            f"no folder can be written at {target} ({error.strerror}); give --out DIR at a place that can be written"
        ) from error
    return target


def write_model(
    folder: Path,
    target: Path,
    gate: dict[str, Any],
    cost: CostTable,
    tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """A copy of the model folder with a new gate section, cost table and (unless None) gates, moved to its place whole.

    Args:
        target: as `check_target` gave it; may be the folder itself, which is then replaced.
        gate: the `gate` section of config.json.
    """
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        new = building / "new"
        replaced = {COST, CONFIG, MARKER} | ({GATES} if tensors is not None else set())
        shutil.copytree(
            folder,
            new,
            ignore=lambda where, names: replaced & set(names) if Path(where) == folder else (),
            copy_function=_link,
        )
        if tensors is not None:
            save_file(tensors, new / GATES)
        cost.save(new / COST)
        meta = json.loads((folder / CONFIG).read_text(encoding="utf-8")) | {"gate": gate}
        (new / CONFIG).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        if target.exists():
            # Running engines keep the files that they have mapped.
            target.rename(building / "old")
            try:
                new.rename(target)
            except OSError:
                (building / "old").rename(target)
                raise
        else:
            new.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Weights are shared with the old folder where the file system can."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
