"""Llama-family checkpoints in GGUF files, through the `gguf` package."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from morph.config import ModelConfig
from morph.errors import CorruptFile, UnsupportedModel

ARCHITECTURES = ("llama", "qwen3")
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


def undo_permutation(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp stores the rows of q and k for interleaved RoPE; back to the rotate-half order of Hugging Face.

    Args:
        weight: `[heads * head_dim, hidden]`.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


class GGUFFile:
    """Tensors of one GGUF file under their Hugging Face names, read one at a time through mmap.

    Raises:
        CorruptFile: not a GGUF file, or truncated.
        UnsupportedModel: another architecture, or biases that Morph does not run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise CorruptFile(
                f"{path} is not a whole GGUF file ({error}); fetch it again, e.g. `morph pull --force NAME`"
            ) from error
        architecture = self._field("general.architecture")
        if architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{path}: architecture {architecture!r} is not supported; use one of {', '.join(ARCHITECTURES)}"
            )
        self.architecture = str(architecture)
        size = path.stat().st_size
        self._tensors: dict[str, Any] = {}
        for tensor in self._reader.tensors:
            if tensor.data_offset + tensor.n_bytes > size:
                raise CorruptFile(f"{path} ends inside tensor {tensor.name}; fetch it again with --force")
            self._tensors[self._hf_name(tensor.name)] = tensor
        self.config = self._read_config()

    def _field(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _hf_name(self, name: str) -> str:
        if name in NAMES:
            return NAMES[name]
        if name == "rope_freqs.weight":
            raise UnsupportedModel(f"{self.path}: stored RoPE factors (llama3 scaling) need the safetensors folder")
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK_NAMES and parts[3] == "weight":
            return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.weight"
        raise UnsupportedModel(f"{self.path}: tensor {name!r} has no place in a Llama or Qwen3 model")

    def _read_config(self) -> ModelConfig:
        arch = self.architecture

        def need(key: str) -> Any:
            value = self._field(f"{arch}.{key}")
            if value is None:
                raise CorruptFile(f"{self.path}: field {arch}.{key} is missing")
            return value

        heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
        eos = self._field("tokenizer.ggml.eos_token_id")
        bos = self._field("tokenizer.ggml.bos_token_id")
        return ModelConfig(
            vocab_size=int(self._tensors["model.embed_tokens.weight"].shape[1]),
            hidden_size=hidden,
            intermediate_size=int(need("feed_forward_length")),
            num_blocks=int(need("block_count")),
            num_heads=heads,
            num_kv_heads=int(self._field(f"{arch}.attention.head_count_kv", heads)),
            head_dim=int(self._field(f"{arch}.attention.key_length", hidden // heads)),
            max_context=int(need("context_length")),
            rms_norm_eps=float(need("attention.layer_norm_rms_epsilon")),
            rope_theta=float(self._field(f"{arch}.rope.freq_base", 10000.0)),
            tie_embeddings="lm_head.weight" not in self._tensors,
            qk_norm="model.layers.0.self_attn.q_norm.weight" in self._tensors,
            bos_token_id=None if bos is None else int(bos),
            eos_token_ids=() if eos is None else (int(eos),),
            ssm=None,
        )

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One tensor, dequantised, in Hugging Face order."""
        tensor = self._tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        # The reader's shape lists the fastest dimension first.
        shape = [int(n) for n in reversed(tensor.shape)]
        out = torch.from_numpy(np.array(values, dtype=np.float32)).reshape(shape)
        if self.architecture == "llama":
            if name.endswith("self_attn.q_proj.weight"):
                out = undo_permutation(out, self.config.num_heads)
            elif name.endswith("self_attn.k_proj.weight"):
                out = undo_permutation(out, self.config.num_kv_heads)
        return out.to(dtype)

    def write_tokenizer(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template) of the file's tokenizer."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)
        tokenizer.save_pretrained(folder)
        template = folder / "chat_template.jinja"
        if template.exists():
            config_path = folder / "tokenizer_config.json"
            config = json.loads(config_path.read_text())
            config["chat_template"] = template.read_text()
            config_path.write_text(json.dumps(config, indent=1))


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
