"""From trained float32 mixers to a Morph folder with int8 rows, checked before it takes its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from morph.checkpoint import ModelSource, open_model
from morph.checkpoint.delta import FILE_LIMIT, pack_delta
from morph.convert.base import place_tokenizer
from morph.convert.card import REQUIRED, card_fields, model_card
from morph.convert.folder import link_or_copy, new_folder
from morph.errors import MorphError

LARGEST_ERROR = 0.05
"""Relative error of one tensor's rounding that an export may have."""
DeltaType = Literal["int8", "bfloat16"]


def export_model(
    source: ModelSource,
    origin: Path,
    mixers: Mapping[str, torch.Tensor],
    out: Path,
    facts: Mapping[str, Any],
    kind: DeltaType = "int8",
    revision: str = "trained",
) -> dict[str, float]:
    """Write the model with these mixers beside its base; an older export there is replaced.

    Gates of the old mixers are left behind: they were fitted to other outputs.

    Args:
        source, origin: the converted model and its folder.
        mixers: every mixer tensor, float32.
        facts: of the training, for the card and `config.json`.

    Returns:
        `bytes` of the delta, and `error`, the largest relative error of a tensor by rounding.

    Raises:
        MorphError: the disk is full, or the written folder is not what it should be.
    """
    meta = {key: value for key, value in source.meta.items() if key not in ("gate", "delta")}
    meta["revision"] = revision
    meta["training"] = dict(facts)
    size = sum(t.numel() for t in mixers.values()) * 2
    with new_folder(out, size, replace=True) as folder:
        for name in meta.get("weights", []):
            link_or_copy(origin / name, folder / name)
        if meta.get("base"):
            _place(origin, str(meta["base"]["file"]), folder)
        place_tokenizer(source.tokenizer_dir, folder)
        host = {name: tensor.detach().float().cpu() for name, tensor in mixers.items()}
        meta["delta"] = pack_delta(host, folder) if kind == "int8" else pack_half(host, folder)
        (folder / "config.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        base_name = str(source.meta.get("name"))
        (folder / "README.md").write_text(model_card(meta, base_name, card_facts(facts)), encoding="utf-8")
        return check_export(folder, host, meta, kind)


def card_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Rows of the model card about the training."""
    rows = {"state": "trained"}
    for name, value in facts.items():
        if isinstance(value, dict):
            rows[name] = ", ".join(f"{key}: {_short(item)}" for key, item in value.items())
        else:
            rows[name] = _short(value)
    return rows


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def pack_half(tensors: Mapping[str, torch.Tensor], folder: Path, file_limit: int = FILE_LIMIT) -> list[str]:
    """Write bfloat16 `delta-*.safetensors`: twice the size of int8, to go on training from."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in sorted(tensors.items()):
        stored = tensor.to(torch.bfloat16 if tensor.dim() == 2 else torch.float32).contiguous()
        if size and size + stored.nbytes > file_limit:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += stored.nbytes
    names = [f"delta-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name)
    return names


def check_export(
    folder: Path, mixers: Mapping[str, torch.Tensor], meta: Mapping[str, Any], kind: DeltaType
) -> dict[str, float]:
    """Read the written folder back: every tensor near its original, files of the expected size, a whole card.

    Raises:
        MorphError: one of these fails.
    """
    written = open_model(folder)
    worst, where = 0.0, ""
    for name, tensor in mixers.items():
        error = float((written.get(name) - tensor).norm() / tensor.norm().clamp_min(1e-12))
        # A NaN compares false with everything, and must fail.
        if not error <= worst:
            worst, where = error, name
    if not worst <= LARGEST_ERROR:
        raise MorphError(f"export of {where} is off by {worst:.3g} (limit {LARGEST_ERROR}); the weights are not sound")
    sizes = [(folder / name).stat().st_size for name in meta["delta"]]
    per_weight = {"int8": 1.1, "bfloat16": 2.1}[kind]
    most = sum(t.numel() * (per_weight if t.dim() == 2 and t.shape[1] >= 32 else 4) for t in mixers.values())
    most += 200 * len(mixers) * 2 + 1024
    largest_tensor = max(t.numel() for t in mixers.values()) * 2
    if sum(sizes) > most or max(sizes) > max(FILE_LIMIT, largest_tensor) + 100_000:
        raise MorphError(f"export has files of {sizes} bytes, expected at most {most:.0f} together; encoding failed")
    fields = card_fields(meta, str(meta.get("name")), card_facts(meta["training"]))
    missing = [field for field in REQUIRED if not fields.get(field)]
    if missing:
        raise MorphError(f"the model card lacks {', '.join(missing)}")
    return {"bytes": float(sum(sizes)), "error": worst}


def _place(origin: Path, file: str, folder: Path) -> None:
    inside = origin / file
    if inside.is_file():
        link_or_copy(inside, folder / file)
        return
    for path in sorted(path for path in inside.rglob("*") if path.is_file()):
        link_or_copy(path, folder / file / path.relative_to(inside))
