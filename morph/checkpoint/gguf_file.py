"""Llama and Qwen3 checkpoints in GGUF files; blocks are dequantised with the `gguf` package."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import torch

from morph.checkpoint.gguf_blocks import TYPES, dequantise
from morph.checkpoint.gguf_header import GGUFHeader, TensorEntry
from morph.checkpoint.remedy import FETCH_AGAIN
from morph.config import ModelConfig
from morph.errors import CorruptFile, UnsupportedModel

ARCHITECTURES = ("llama", "qwen3")
PIECE = 1 << 18
"""Values dequantised at a time: bounds the temporaries of the dequantiser."""

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"


def undo_permutation(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp stores the rows of q and k for interleaved RoPE; back to the rotate-half order of Hugging Face.

    Args:
        weight: `[heads * head_dim, hidden]`.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


class GGUFFile:
    """Tensors of one GGUF file under their Hugging Face names, read one at a time through mmap.

    Attributes:
        header: fields and tensor entries.
        config: shape of the model, without ssm.

    Raises:
        CorruptFile: not a GGUF file, truncated, or without a field that is needed.
        UnsupportedModel: another architecture or tensor type, or parts that Morph does not run.
    """

    def __init__(self, path: Path, remedy: str = FETCH_AGAIN) -> None:
        self.path, self.remedy = path, remedy
        self.header = GGUFHeader(path, remedy)
        self.architecture = str(self.header.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{path}: architecture {self.architecture!r} is not supported; use one of {', '.join(ARCHITECTURES)}"
            )
        self._entries: dict[str, TensorEntry] = {}
        for entry in self.header.tensors.values():
            self._check(entry)
            if entry.name != ROPE_FACTORS:
                self._entries[self._hf_name(entry.name)] = entry
        try:
            self.config = self._read_config()
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise CorruptFile(f"{path}: a field has a value that makes no sense ({error}); {remedy}") from error
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error

    # ---- tensors

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._entries[name].shape

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One tensor, dequantised, in Hugging Face order. Peak memory: the result (twice for q and k) and a bit."""
        out = self._read(self._entries[name], dtype)
        if self.architecture == "llama":
            if name.endswith("self_attn.q_proj.weight"):
                return undo_permutation(out, self.config.num_heads)
            if name.endswith("self_attn.k_proj.weight"):
                return undo_permutation(out, self.config.num_kv_heads)
        return out

    def _read(self, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
        kind = gguf.GGMLQuantizationType(entry.kind)
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        columns = entry.shape[-1]
        rows, row_bytes = math.prod(entry.shape[:-1]), columns // per_block * block_bytes
        begin = self.header.data_start + entry.offset
        out = torch.empty(rows, columns, dtype=dtype)
        step = max(1, PIECE // columns)
        for row in range(0, rows, step):
            end = min(row + step, rows)
            # torch takes writable buffers only, so a piece is copied out of the mapping first.
            piece = bytearray(self.header.map[begin + row * row_bytes : begin + end * row_bytes])
            raw = torch.frombuffer(piece, dtype=torch.uint8).view(end - row, row_bytes)
            out[row:end] = dequantise(raw, kind)
        return out.view(entry.shape)

    def _check(self, entry: TensorEntry) -> None:
        """Type, whole blocks, and inside the file."""
        kind = next((kind for kind in TYPES if kind == entry.kind), None)
        if kind is None:
            name = next((k.name for k in gguf.GGMLQuantizationType if k == entry.kind), str(entry.kind))
            known = ", ".join(k.name for k in TYPES)
            raise UnsupportedModel(f"{self.path}: tensor {entry.name} has type {name}; Morph reads {known}")
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not math.prod(entry.shape) or not entry.shape or entry.shape[-1] % per_block:
            raise CorruptFile(
                f"{self.path}: tensor {entry.name} of shape {entry.shape} is not made of whole {kind.name} blocks; "
                f"{self.remedy}"
            )
        size = math.prod(entry.shape) // per_block * block_bytes
        if self.header.data_start + entry.offset + size > len(self.header.map):
            raise CorruptFile(
                f"{self.path} ends inside tensor {entry.name} ({len(self.header.map)} bytes); {self.remedy}"
            )

    def _hf_name(self, name: str) -> str:
        if name in NAMES:
            return NAMES[name]
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK_NAMES and parts[3] == "weight":
            return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.weight"
        raise UnsupportedModel(
            f"{self.path}: tensor {name!r} has no place in a Llama or Qwen3 model without biases and experts"
        )

    # ---- shape

    def _field(self, key: str, default: Any = None) -> Any:
        return self.header.get(f"{self.architecture}.{key}", default)

    def _need(self, key: str) -> Any:
        value = self._field(key)
        if value is None:
            raise CorruptFile(f"{self.path}: field {self.architecture}.{key} is missing; {self.remedy}")
        return value

    def _read_config(self) -> ModelConfig:
        if "model.embed_tokens.weight" not in self._entries:
            raise CorruptFile(f"{self.path}: tensor token_embd.weight is missing; {self.remedy}")
        blocks = {name.split(".")[2] for name in self._entries if name.startswith("model.layers.")}
        if blocks != {str(block) for block in range(len(blocks))} or len(blocks) != self._need("block_count"):
            raise CorruptFile(
                f"{self.path} has tensors of {len(blocks)} blocks, block_count is {self._need('block_count')}; "
                f"{self.remedy}"
            )
        heads, hidden = int(self._need("attention.head_count")), int(self._need("embedding_length"))
        head_dim = int(self._field("attention.key_length", hidden // heads))
        if int(self._field("rope.dimension_count", head_dim)) != head_dim:
            raise UnsupportedModel(f"{self.path}: RoPE over a part of the head is not supported")
        theta = _short(self._field("rope.freq_base", 10000.0))
        bos = self.header.get("tokenizer.ggml.bos_token_id")
        ends = [self.header.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
        return ModelConfig(
            vocab_size=self._entries["model.embed_tokens.weight"].shape[0],
            hidden_size=hidden,
            intermediate_size=int(self._need("feed_forward_length")),
            num_blocks=len(blocks),
            num_heads=heads,
            num_kv_heads=int(self._field("attention.head_count_kv", heads)),
            head_dim=head_dim,
            max_context=int(self._need("context_length")),
            rms_norm_eps=_short(self._need("attention.layer_norm_rms_epsilon")),
            rope_theta=theta,
            rope_scaling=self._rope_scaling(theta, head_dim),
            tie_embeddings="lm_head.weight" not in self._entries,
            qk_norm="model.layers.0.self_attn.q_norm.weight" in self._entries,
            bos_token_id=None if bos is None else int(bos),
            eos_token_ids=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
            ssm=None,
        )

    def _rope_scaling(self, theta: float, head_dim: int) -> dict[str, Any] | None:
        """RoPE scaling as Hugging Face writes it: none, linear, or Llama 3's, which GGUF stores as factors."""
        if ROPE_FACTORS in self.header.tensors:
            factors = self._read(self.header.tensors[ROPE_FACTORS], torch.float32).flatten()
            return self._llama3_scaling(factors, theta, head_dim)
        kind = self._field("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": _short(self._need("rope.scaling.factor"))}
        raise UnsupportedModel(f"{self.path}: RoPE scaling {kind!r} is not supported; use none, linear or llama3")

    def _llama3_scaling(self, factors: torch.Tensor, theta: float, head_dim: int) -> dict[str, Any]:
        """The parameters behind stored factors, accepted only when they give back every factor."""
        wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        factor, low, high = float(factors.max()), 1.0, 4.0
        for context in (8192, int(self._field("rope.scaling.original_context_length", 8192))):
            blend = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
            expected = 1 / ((1 - blend) / factor + blend)
            if factors.shape == expected.shape and torch.allclose(factors.double(), expected, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": context,
                }
        raise UnsupportedModel(
            f"{self.path}: the RoPE factors are not those of a Llama 3 model; use the safetensors folder"
        )


def _short(value: Any) -> float:
    """The decimal that was rounded to the file's float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(f"{float(value):.7g}")
