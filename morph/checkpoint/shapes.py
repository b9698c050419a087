"""Which tensors a model of a given shape has, and their shapes."""

from __future__ import annotations

from morph.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def base_shapes(config: ModelConfig) -> Shapes:
    """Tensors of the base model under their Hugging Face names; no attention in blocks that are `ssm` only."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for block, kind in enumerate(config.block_kinds):
        name = f"model.layers.{block}."
        shapes |= {
            name + "input_layernorm.weight": (hidden,),
            name + "post_attention_layernorm.weight": (hidden,),
            name + "mlp.gate_proj.weight": (inner, hidden),
            name + "mlp.up_proj.weight": (inner, hidden),
            name + "mlp.down_proj.weight": (hidden, inner),
        }
        if kind == "ssm":
            continue
        shapes |= {
            name + "self_attn.q_proj.weight": (config.q_size, hidden),
            name + "self_attn.k_proj.weight": (config.kv_size, hidden),
            name + "self_attn.v_proj.weight": (config.kv_size, hidden),
            name + "self_attn.o_proj.weight": (hidden, config.q_size),
        }
        if config.qk_norm:
            shapes[name + "self_attn.q_norm.weight"] = (head,)
            shapes[name + "self_attn.k_norm.weight"] = (head,)
    return shapes


def delta_shapes(config: ModelConfig) -> Shapes:
    """Tensors of the ssm mixers, in the blocks that have one."""
    shapes: Shapes = {}
    if config.ssm is None:
        return shapes
    hidden, rank, states = config.hidden_size, config.ssm.gate_rank, config.num_state_heads
    for block, kind in enumerate(config.block_kinds):
        if kind == "attention":
            continue
        name = f"blocks.{block}.ssm."
        shapes |= {
            name + "qkv.weight": (config.qkv_size, hidden),
            name + "conv.weight": (config.qkv_size, config.ssm.conv_width),
            name + "ab.weight": (2 * states, hidden),
            name + "ab.bias": (2 * states,),
            name + "gain": (config.num_heads,),
            name + "gate_down.weight": (rank, hidden),
            name + "gate_up.weight": (config.q_size, rank),
            name + "gate_up.bias": (config.q_size,),
            name + "out.weight": (hidden, config.q_size),
        }
        if config.ssm.window:
            shapes[name + "mix"] = (config.num_heads,)
    return shapes
