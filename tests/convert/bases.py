"""Tiny bases to convert, and texts to train on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.tiny import tiny_config, tiny_tensors, write_tokenizer

WORDS = "the river runs under an old bridge and nobody counts how many boats pass by before evening".split()  # noqa: SIM905


def tiny_base(folder: Path, qk_norm: bool = False, **changes: Any) -> Path:
    """A Hugging Face folder with the shape of `tiny_config` and random weights; Qwen3 with `qk_norm`, else Llama."""
    config = tiny_config(ssm=False, qk_norm=qk_norm)
    base, _ = tiny_tensors(config)
    folder.mkdir(parents=True)
    save_file({name: t.to(torch.bfloat16).contiguous() for name, t in base.items()}, folder / "model.safetensors")
    data = {
        "architectures": ["Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_blocks,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": True,
        "eos_token_id": 299,
    }
    (folder / "config.json").write_text(json.dumps(data | changes))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# tiny\n")
    write_tokenizer(folder, config)
    return folder


def write_texts(path: Path, documents: int = 60, seed: int = 0) -> Path:
    """A corpus of short documents in one file, separated by a line `<|doc|>`."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randrange(20, 60))) for _ in range(documents)]
    path.write_text("\n<|doc|>\n".join(texts), encoding="utf-8")
    return path
