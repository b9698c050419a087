"""Small random models on disk, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from morph.config import FORMAT_VERSION, ModelConfig, SSMConfig

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_config(ssm: bool = True, window: int = 0, state_heads: str = "q", **changes: Any) -> ModelConfig:
    """Four blocks, 4 query heads on 2 kv heads of 32."""
    values: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_blocks": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_context": 512,
        "eos_token_ids": (299,),
        "ssm": SSMConfig(window=window, state_heads=state_heads, gate_rank=32) if ssm else None,  # type: ignore[arg-type]
    }
    return ModelConfig(**(values | changes))


def tiny_tensors(config: ModelConfig, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Random base and delta weights, scaled so that layouts differ visibly and logits have clear margins."""
    rng = torch.Generator().manual_seed(seed)
    # The delta has its own stream, so that the base is the same with and without it.
    base_rng, delta_rng = rng, torch.Generator().manual_seed(seed + 1)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=rng) * scale / columns**0.5

    base = {"model.embed_tokens.weight": 0.3 * torch.randn(config.vocab_size, config.hidden_size, generator=rng)}
    base["model.norm.weight"] = 1 + 0.1 * torch.randn(config.hidden_size, generator=rng)
    delta: dict[str, torch.Tensor] = {}
    hidden, inner = config.hidden_size, config.intermediate_size
    for block in range(config.num_blocks):
        name = f"model.layers.{block}."
        rng = base_rng
        base[name + "input_layernorm.weight"] = 1 + 0.1 * torch.randn(hidden, generator=rng)
        base[name + "post_attention_layernorm.weight"] = 1 + 0.1 * torch.randn(hidden, generator=rng)
        base[name + "self_attn.q_proj.weight"] = matrix(config.q_size, hidden, 2.0)
        base[name + "self_attn.k_proj.weight"] = matrix(config.kv_size, hidden, 2.0)
        base[name + "self_attn.v_proj.weight"] = matrix(config.kv_size, hidden)
        base[name + "self_attn.o_proj.weight"] = matrix(hidden, config.q_size)
        base[name + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        base[name + "mlp.up_proj.weight"] = matrix(inner, hidden)
        base[name + "mlp.down_proj.weight"] = matrix(hidden, inner)
        if config.qk_norm:
            base[name + "self_attn.q_norm.weight"] = 1 + 0.1 * torch.randn(config.head_dim, generator=rng)
            base[name + "self_attn.k_norm.weight"] = 1 + 0.1 * torch.randn(config.head_dim, generator=rng)
        if config.ssm is None:
            continue
        name = f"blocks.{block}.ssm."
        rng = delta_rng
        heads, rank = config.num_state_heads, config.ssm.gate_rank
        delta[name + "qkv.weight"] = matrix(config.qkv_size, hidden)
        conv = 0.1 * torch.randn(config.qkv_size, config.ssm.conv_width, generator=rng)
        conv[:, -1] += 1
        delta[name + "conv.weight"] = conv
        delta[name + "ab.weight"] = matrix(2 * heads, hidden)
        delta[name + "ab.bias"] = torch.cat([torch.linspace(1, 5, heads), torch.zeros(heads)])
        delta[name + "gain"] = torch.ones(config.num_heads)
        delta[name + "gate_down.weight"] = matrix(rank, hidden)
        delta[name + "gate_up.weight"] = matrix(config.q_size, rank)
        delta[name + "gate_up.bias"] = torch.full((config.q_size,), 1.278)
        delta[name + "out.weight"] = matrix(hidden, config.q_size)
        if config.ssm.window:
            delta[name + "mix"] = torch.zeros(config.num_heads)
    return base, delta


def write_tokenizer(folder: Path, config: ModelConfig) -> None:
    """A byte-level tokenizer without merges: one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    data = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(data))


def tiny_model(
    folder: Path, ssm: bool = True, window: int = 0, state_heads: str = "q", gates: bool = True, **changes: Any
) -> Path:
    """A Morph folder with random weights and, where it has ssm, random gates; returns the folder."""
    config = tiny_config(ssm, window, state_heads, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    base, delta = tiny_tensors(config)
    save_file({k: v.contiguous() for k, v in base.items()}, folder / "weights.safetensors")
    meta: dict[str, Any] = {
        "model_type": "morph",
        "format_version": FORMAT_VERSION,
        "architectures": ["MorphForCausalLM"],
        "name": "tiny",
        "revision": "r0",
        "model": config.to_dict(),
        "weights": ["weights.safetensors"],
        "delta": [],
    }
    if ssm:
        save_file({k: v.contiguous() for k, v in delta.items()}, folder / "delta-00001-of-00001.safetensors")
        meta["delta"] = ["delta-00001-of-00001.safetensors"]
        if gates:
            write_gates(folder, config, meta)
    (folder / "config.json").write_text(json.dumps(meta))
    write_tokenizer(folder, config)
    return folder


def write_gates(folder: Path, config: ModelConfig, meta: dict[str, Any]) -> None:
    """Random gates whose decisions differ between prompts, with a cost of one per block at any length."""
    from morph.gate.cost import CostTable

    rng = torch.Generator().manual_seed(7)
    width = 2 * config.hidden_size + 1
    gates: dict[str, torch.Tensor] = {}
    for block in range(config.num_blocks):
        name = f"blocks.{block}.gate."
        gates[name + "fc1.weight"] = torch.randn(32, width, generator=rng) / width**0.5 * 3
        gates[name + "fc1.bias"] = torch.zeros(32)
        gates[name + "fc2.weight"] = torch.randn(1, 32, generator=rng) / 32**0.5
        gates[name + "fc2.bias"] = torch.zeros(1)
    save_file(gates, folder / "gate.safetensors")
    # The ssm saves one second in every block at every length, so decisions come from the gates alone.
    ones = [[1.0, 1.0]] * config.num_blocks
    twos = [[2.0, 2.0]] * config.num_blocks
    CostTable((16, 4096), twos, ones, 32, "analytic", "test").save(folder / "cost.json")
    meta["gate"] = {
        "policy": "utility",
        "budgets": [0.0, 0.5, 1.0],
        "tau": [1e9, 0.0, -1e9],
        "mean_answer_tokens": 32,
        "cost_table": "cost.json",
    }
