"""Compact deltas: int8 rows with one scale each."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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
    """int8 rows and float32 scales `[rows]`; per row the clipping that gives the least squared error."""
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


def pack_delta(tensors: dict[str, torch.Tensor], folder: Path) -> list[str]:
    """Write `delta-*.safetensors` files with the large matrices in int8; returns their names."""
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
        if size + tensor.nbytes > FILE_LIMIT:
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
    """Tensors of an early training run under the names of a model folder."""
    out = {}
    for name, tensor in load_file(path).items():
        block, short = name.split(".")
        if short == "cw":
            tensor = tensor.squeeze(1)
        out[f"blocks.{block}.ssm.{FIRST_DELTA[short]}"] = tensor
    return out
