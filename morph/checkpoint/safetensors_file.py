"""Tensors of one or several safetensors files, with int8 rows dequantised on the way."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from morph.config import ModelConfig
from morph.errors import CorruptFile, UnsupportedModel

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")


class SafetensorsFiles:
    """Tensors of several files as one; `X.q8` (int8 `[rows, …]`) with `X.scale` (`[rows]`) is read as `X`.

    Raises:
        CorruptFile: a file that is missing, truncated or no safetensors file.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[str, tuple[Any, Path]] = {}
        for path in paths:
            if not path.exists():
                raise CorruptFile(f"{path} is missing; fetch the model again with `morph pull --force NAME`")
            try:
                file = safe_open(path, framework="pt")
                names = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise CorruptFile(
                    f"{path} is not a whole safetensors file ({error}); fetch it again with `morph pull --force NAME`"
                ) from error
            for name in names:
                self._files[name] = (file, path)

    def names(self) -> list[str]:
        """Names of all tensors, as they are read."""
        plain = (n.removesuffix(".q8") for n in self._files if not n.endswith(".scale"))
        return list(dict.fromkeys(plain))

    def has(self, name: str) -> bool:
        """True when `get(name)` finds a tensor."""
        return name in self._files or f"{name}.q8" in self._files

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One tensor; int8 rows times their scale."""
        if name in self._files:
            tensor: torch.Tensor = self._files[name][0].get_tensor(name)
            return tensor.to(dtype)
        quantised = self._files[f"{name}.q8"][0].get_tensor(f"{name}.q8").float()
        scale = self._files[f"{name}.scale"][0].get_tensor(f"{name}.scale").float()
        return (quantised * scale.view(-1, *([1] * (quantised.dim() - 1)))).to(dtype)


def open_hf_folder(folder: Path) -> tuple[ModelConfig, SafetensorsFiles]:
    """A Hugging Face folder of a Llama-family or Qwen3 model.

    Raises:
        UnsupportedModel: another architecture, or biases.
        CorruptFile: files missing or broken.
    """
    data = read_json(folder / "config.json")
    architecture = (data.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{folder}: architecture {architecture!r} is not supported; use one of {', '.join(ARCHITECTURES)}"
        )
    if data.get("attention_bias") or data.get("mlp_bias"):
        raise UnsupportedModel(f"{folder}: projections with biases are not supported")
    if data.get("use_sliding_window") or (architecture == "MistralForCausalLM" and data.get("sliding_window")):
        raise UnsupportedModel(f"{folder}: base models with sliding-window attention are not supported")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index)["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    files = SafetensorsFiles(folder / name for name in names)
    heads = int(data["num_attention_heads"])
    rope = data.get("rope_parameters") or {}
    scaling = data.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    eos = data.get("eos_token_id")
    config = ModelConfig(
        vocab_size=int(data["vocab_size"]),
        hidden_size=int(data["hidden_size"]),
        intermediate_size=int(data["intermediate_size"]),
        num_blocks=int(data["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(data.get("num_key_value_heads") or heads),
        head_dim=int(data.get("head_dim") or data["hidden_size"] // heads),
        max_context=int(data["max_position_embeddings"]),
        rms_norm_eps=float(data["rms_norm_eps"]),
        rope_theta=float(data.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        bos_token_id=data.get("bos_token_id"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        ssm=None,
    )
    return config, files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CorruptFile: missing or not JSON.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} does not hold a JSON object")
    return value
