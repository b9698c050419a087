"""Hugging Face folders: `config.json` and safetensors of a Llama-like or Qwen3 model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from morph.checkpoint.remedy import FETCH_AGAIN
from morph.checkpoint.safetensors_file import SafetensorsFiles
from morph.config import ModelConfig
from morph.errors import CorruptFile, UnsupportedModel

log = logging.getLogger(__name__)

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")


def open_hf_folder(folder: Path, remedy: str = FETCH_AGAIN) -> tuple[ModelConfig, SafetensorsFiles]:
    """Shape and tensors of a Hugging Face folder.

    Raises:
        UnsupportedModel: another architecture, or a variant that Morph does not run.
        CorruptFile: files missing or broken.
    """
    data = read_json(folder / "config.json", remedy)
    _check_supported(folder, data)
    config = _read_config(folder, data)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index, remedy).get("weight_map")
        if not isinstance(shards, dict):
            raise CorruptFile(f"{index} has no weight_map; {remedy}")
        names = sorted({str(name) for name in shards.values()})
    else:
        names = ["model.safetensors"]
        if not (folder / names[0]).exists() and any(folder.glob("*.bin")):
            raise UnsupportedModel(f"{folder} has pickled weights (*.bin) only; convert them to safetensors")
    return config, SafetensorsFiles((folder / name for name in names), remedy)


def _check_supported(folder: Path, data: dict[str, Any]) -> None:
    architecture = (data.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{folder}: architecture {architecture!r} is not supported; use one of {', '.join(ARCHITECTURES)}"
        )
    refused = {
        "attention_bias": "biases in attention",
        "mlp_bias": "biases in the MLP",
        "use_sliding_window": "sliding-window attention in some blocks",
        "quantization_config": "weights quantised in the safetensors files",
    }
    for key, what in refused.items():
        if data.get(key):
            raise UnsupportedModel(f"{folder}: {what} ({key}) is not supported; use a plain float checkpoint")
    if data.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"{folder}: activation {data['hidden_act']!r} is not supported, want silu")
    if (_rope(data).get("partial_rotary_factor") or data.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel(f"{folder}: RoPE over a part of the head is not supported")


def _rope(data: dict[str, Any]) -> dict[str, Any]:
    """RoPE parameters: `rope_parameters` since transformers 5, `rope_scaling` before."""
    return data.get("rope_parameters") or data.get("rope_scaling") or {}


def _read_config(folder: Path, data: dict[str, Any]) -> ModelConfig:
    rope = _rope(data)
    kind = rope.get("rope_type", rope.get("type", "default"))
    eos = data.get("eos_token_id")
    # Chat models list their end-of-turn tokens here, config.json often has one only.
    if (folder / "generation_config.json").is_file():
        eos = read_json(folder / "generation_config.json").get("eos_token_id", eos)
    bos = data.get("bos_token_id")
    try:
        heads, hidden = int(data["num_attention_heads"]), int(data["hidden_size"])
        context = int(data["max_position_embeddings"])
        window = data.get("sliding_window")
        if data["architectures"][0] == "MistralForCausalLM" and window and window < context:
            # Up to the window's length sliding attention is full attention.
            log.warning("%s attends to %d tokens at most; max_context is set to that", folder, window)
            context = int(window)
        return ModelConfig(
            vocab_size=int(data["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(data["intermediate_size"]),
            num_blocks=int(data["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(data.get("num_key_value_heads") or heads),
            head_dim=int(data.get("head_dim") or hidden // heads),
            max_context=context,
            rms_norm_eps=float(data["rms_norm_eps"]),
            rope_theta=float(data.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            rope_scaling=rope if kind != "default" else None,
            tie_embeddings=bool(data.get("tie_word_embeddings", False)),
            qk_norm=data["architectures"][0] == "Qwen3ForCausalLM",
            bos_token_id=bos if bos is None else int(bos),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
            ssm=None,
        )
    except KeyError as error:
        raise CorruptFile(f"{folder / 'config.json'} has no {error}; {FETCH_AGAIN}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CorruptFile(
            f"{folder / 'config.json'} has a value that makes no sense ({error}); {FETCH_AGAIN}"
        ) from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{folder}: {error}") from error


def read_json(path: Path, remedy: str = FETCH_AGAIN) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CorruptFile: missing or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{path} cannot be read as JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} does not hold a JSON object; {remedy}")
    return value
