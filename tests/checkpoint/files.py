"""Tiny checkpoints in the formats that Morph reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from morph.checkpoint.gguf_file import BLOCK_NAMES, NAMES
from morph.config import ModelConfig

Tensors = dict[str, torch.Tensor]


def hf_config_json(config: ModelConfig, architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """`config.json` of a Hugging Face folder."""
    return {
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_blocks,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 299,
    } | changes


def write_hf(folder: Path, config: ModelConfig, tensors: Tensors, shards: int = 1, **changes: Any) -> Path:
    """A Hugging Face folder; sharded with an index when `shards` > 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config_json(config, **changes)))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter orders them for architecture llama."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Tensors,
    arch: str = "llama",
    kind: str = "F32",
    kinds: dict[str, str] | None = None,
    fields: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it.

    Args:
        kind: type of the matrices; `kinds` overrides it by Hugging Face name. Vectors are F32.
        fields: further or other fields of the architecture, without its prefix; None leaves one out.
        tokenizer: fields below `tokenizer.`; a byte vocabulary when not given.
        extra: tensors under their GGUF names.
    """
    writer = gguf.GGUFWriter(path, arch)
    shape: dict[str, Any] = {
        "block_count": config.num_blocks,
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    for key, value in (shape | (fields or {})).items():
        if value is not None:
            _add(writer, f"{arch}.{key}", value)
    for key, value in (tokenizer or byte_tokenizer(config.vocab_size)).items():
        if value is not None:
            _add(writer, f"tokenizer.{key}", value)
    to_gguf = {hf: own for own, hf in NAMES.items()}
    blocks = {hf: own for own, hf in BLOCK_NAMES.items()}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = permute(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
        if name in to_gguf:
            stored = to_gguf[name]
        else:
            _, _, block, part = name.split(".", 3)
            stored = f"blk.{block}.{blocks[part.removesuffix('.weight')]}.weight"
        chosen = "F32" if values.ndim == 1 else (kinds or {}).get(name, kind)
        number = gguf.GGMLQuantizationType[chosen]
        writer.add_tensor(stored, gguf.quants.quantize(values, number), raw_dtype=number)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_tokenizer(size: int) -> dict[str, Any]:
    """A byte-level vocabulary with one merge, padded with control tokens; the last one ends answers."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "th", *(f"<|{i}|>" for i in range(size - len(letters) - 1))]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": tokens,
        "ggml.token_type": [1] * (len(letters) + 1) + [3] * (size - len(letters) - 1),
        "ggml.merges": ["t h"],
        "ggml.bos_token_id": size - 2,
        "ggml.eos_token_id": size - 1,
        "ggml.add_bos_token": False,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}",
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
