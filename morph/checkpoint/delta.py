"""Compact deltas: int8 rows with one scale each, in files that a git host takes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from morph.checkpoint.remedy import FETCH_AGAIN
from morph.errors import CorruptFile, UnsupportedModel

FILE_LIMIT = 15_500_000
"""Bytes of tensors per file."""

FIRST_DELTA = {
    "wqkv": "qkv.weight",
    "cw": "conv.weight",
    "wab": "ab.weight",
    "ab": "ab.bias",
    "sc": "gain",
    "za": "gate_down.weight",
    "zb": "gate_up.weight",
    "zbias": "gate_up.bias",
    "wo": "out.weight",
}
"""Short names of early training runs and what they are called in a model folder."""


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 rows and float32 scales `[rows]`; per row the clipping that gives the least squared error.

    Args:
        weight: `[rows, columns]`.
    """
    weight = weight.float()
    peak = weight.abs().amax(dim=1).clamp_min(1e-12)
    best = torch.full_like(peak, float("inf"))
    scale = peak / 127
    for share in torch.linspace(0.7, 1.0, 13).tolist():
        trial = peak * share / 127
        rounded = (weight / trial[:, None]).round().clamp(-127, 127) * trial[:, None]
        error = (rounded - weight).square().sum(dim=1)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, trial, scale)
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def pack_delta(tensors: dict[str, torch.Tensor], folder: Path, file_limit: int = FILE_LIMIT) -> list[str]:
    """Write `delta-*.safetensors` files; returns their names for `config.json`.

    Large matrices become int8; the decay and write projection, which is small and steers the state, and the conv
    stay float16; vectors float32.

    Args:
        tensors: mixers under the names of a model folder.
        file_limit: bytes of tensors per file, unless one tensor alone is larger.
    """
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        large = tensor.dim() == 2 and tensor.shape[1] >= 32 and not name.endswith("ab.weight")
        if large:
            packed[f"{name}.q8"], packed[f"{name}.scale"] = quantise_rows(tensor)
        else:
            packed[name] = tensor.to(torch.float16 if tensor.dim() == 2 else torch.float32).contiguous()
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in packed.items():
        # Scales stay beside their rows.
        if size and size + tensor.nbytes > file_limit and not name.endswith(".scale"):
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = [f"delta-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    folder.mkdir(parents=True, exist_ok=True)
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name)
    return names


def read_first_delta(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of an early training run under the names of a model folder, in the file's dtype.

    Raises:
        CorruptFile: not a whole safetensors file.
        UnsupportedModel: a tensor with a name of another format.
    """
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CorruptFile(f"{path} is not a whole safetensors file ({error}); {FETCH_AGAIN}") from error
    out = {}
    for name, tensor in stored.items():
        block, _, short = name.partition(".")
        if not block.isdecimal() or short not in FIRST_DELTA:
            raise UnsupportedModel(f"{path}: tensor {name!r} is not one of BLOCK.{{{', '.join(FIRST_DELTA)}}}")
        out[f"blocks.{block}.ssm.{FIRST_DELTA[short]}"] = tensor.squeeze(1) if short == "cw" else tensor
    return out
