"""`morph convert` without its command line: a Morph folder with mixers that start as copies of the attention."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from morph.checkpoint import open_model
from morph.checkpoint.shapes import base_shapes, delta_shapes
from morph.config import FORMAT_VERSION, BlockKind, ModelConfig, SSMConfig
from morph.convert.base import Base, place_base, place_tokenizer
from morph.convert.card import model_card
from morph.convert.folder import new_folder
from morph.errors import InvalidRequest
from morph.model.block import Block
from morph.model.model import source_name

WEIGHT_FILE_BYTES = 4_000_000_000


def converted_config(
    config: ModelConfig,
    ssm: SSMConfig,
    static_attention: Sequence[int] = (),
    static_ssm: Sequence[int] = (),
) -> ModelConfig:
    """The shape after conversion.

    Raises:
        InvalidRequest: a block that does not exist or is static in both ways, or values that make no mixer.
    """
    if ssm.window not in (0, 64):
        raise InvalidRequest(f"window is {ssm.window}; use 0 or 64", "window")
    if ssm.state_heads not in ("q", "kv"):
        raise InvalidRequest(f"state heads are {ssm.state_heads!r}; use q or kv", "state_heads")
    if ssm.gate_rank < 1:
        raise InvalidRequest(f"gate rank is {ssm.gate_rank}; use at least 1", "gate_rank")
    kinds: list[BlockKind] = ["adaptive"] * config.num_blocks
    for kind, blocks in (("attention", static_attention), ("ssm", static_ssm)):
        for block in blocks:
            if not 0 <= block < config.num_blocks:
                raise InvalidRequest(f"block {block} does not exist; the model has 0 to {config.num_blocks - 1}")
            if kinds[block] != "adaptive":
                raise InvalidRequest(f"block {block} is named twice; it is {kinds[block]} or {kind}, not both")
            kinds[block] = kind  # type: ignore[call-overload]
    if all(kind == "attention" for kind in kinds):
        raise InvalidRequest("every block is static attention: there is nothing to convert")
    return replace(config, ssm=ssm, block_kinds=tuple(kinds))


def initial_mixers(base: Base, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Mixers that start as copies of their block's attention, under the names of a model folder, float32."""
    tensors: dict[str, torch.Tensor] = {}
    whole = replace(config, block_kinds=())
    for index, kind in enumerate(config.block_kinds):
        if kind == "attention":
            continue
        block = Block(whole, "adaptive")
        assert block.attention is not None and block.ssm is not None
        with torch.no_grad():
            for name, parameter in block.attention.named_parameters():
                parameter.copy_(base.source.get(source_name(f"blocks.{index}.attention.{name}")))
        block.ssm.init_from_attention(block.attention)
        tensors |= {f"blocks.{index}.ssm.{name}": p.detach().clone() for name, p in block.ssm.named_parameters()}
    return tensors


def convert(base: Base, out: Path, config: ModelConfig, name: str | None = None, licence: str | None = None) -> Path:
    """Write the Morph folder; it appears whole or not at all.

    The base is referred to by its own files, linked or copied. Only where a block gives its attention up for good are
    the weights written anew, without that attention.

    Raises:
        InvalidRequest: `out` exists. MorphError: the disk is full.
    """
    drops = "ssm" in config.block_kinds
    mixers = initial_mixers(base, config)
    size = sum(tensor.nbytes for tensor in mixers.values()) // 2 + base.size
    meta: dict[str, Any] = {
        "model_type": "morph",
        "format_version": FORMAT_VERSION,
        "architectures": ["MorphForCausalLM"],
        "name": name or out.resolve().name,
        "revision": "r0",
        "licence": licence or base.licence,
        "model": config.to_dict(),
    }
    with new_folder(out, size) as folder:
        if drops:
            meta["weights"] = _write_weights(base, config, folder)
            place_tokenizer(base.source.tokenizer_dir, folder)
        else:
            place_base(base, folder)
            meta["base"] = base.reference | {"sha256": base.reference.get("sha256") or base.digest()}
        # Copies of what mostly is 16 bit already; training turns them into float32 masters.
        stored = {name: tensor.to(torch.bfloat16) for name, tensor in mixers.items()}
        save_file(stored, folder / "delta-00001-of-00001.safetensors")
        meta["delta"] = ["delta-00001-of-00001.safetensors"]
        (folder / "config.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        card = model_card(meta, base.name, {"state": "not trained: mixers are copies of the attention"})
        (folder / "README.md").write_text(card, encoding="utf-8")
        check_folder(folder, config)
    return out


def check_folder(folder: Path, config: ModelConfig) -> None:
    """Open what was written and compare its tensors with the shape. Raises as `open_model` does."""
    source = open_model(folder)
    missing = [name for name in base_shapes(config) | delta_shapes(config) if not source.has(name)]
    assert not missing and source.config == config, f"written folder lacks {missing}"


def exact_type(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the smallest float type that holds it exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        small = tensor.to(dtype)
        if torch.equal(small.float(), tensor):
            return small
    return tensor


def _write_weights(base: Base, config: ModelConfig, folder: Path) -> list[str]:
    """All tensors of the base that the new shape has, in their exact types."""
    names: list[str] = []
    part: dict[str, torch.Tensor] = {}
    size = 0
    wanted = list(base_shapes(config))
    for position, name in enumerate(wanted):
        part[name] = exact_type(base.source.get(name).float()).contiguous().clone()
        size += part[name].nbytes
        if size > WEIGHT_FILE_BYTES or position + 1 == len(wanted):
            names.append(f"weights-{len(names) + 1:05d}.safetensors")
            save_file(part, folder / names[-1])
            part, size = {}, 0
    return names
