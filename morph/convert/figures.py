"""What a conversion costs and saves, from the shapes alone: parameters, memory, operations by context length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from morph.checkpoint.shapes import base_shapes, delta_shapes
from morph.config import ModelConfig
from morph.gate.cost import CPU_RATES, mixer_work
from morph.hub.describe import state_bytes


@dataclass(frozen=True)
class ContextRow:
    """Whole-model figures at one context length.

    Attributes:
        attention, half, ssm: FLOPs per decoded token (a multiply-add counts as two): all-attention, half of the free
            blocks, all-ssm.
        prefill_saved: share of the prefill's FLOPs that all-ssm saves.
        attention_bytes, ssm_bytes: memory of one request, KV in bfloat16, states in float32.
    """

    context: int
    attention: float
    half: float
    ssm: float
    prefill_saved: float
    attention_bytes: int
    ssm_bytes: int

    @property
    def decode_saved(self) -> float:
        """Share of a decode step's FLOPs that all-ssm saves; negative where it costs more."""
        return 1 - self.ssm / self.attention


@dataclass(frozen=True)
class Figures:
    """See the fields' names; break-even lengths are the first context at which the ssm of a block is cheaper."""

    base_parameters: int
    delta_parameters: int
    state_bytes_per_block: int
    kv_bytes_per_token_per_block: int
    break_even_memory: int
    break_even_decode: int
    break_even_prefill: int
    rows: tuple[ContextRow, ...]


def figures(config: ModelConfig) -> Figures:
    """Figures of a model with ssm mixers.

    Raises:
        ValueError: the model has none.
    """
    state = state_bytes(config)
    if state is None:
        raise ValueError("the model has no ssm mixers")
    attention, ssm = mixer_work(config, CPU_RATES)
    extra = max(0.0, ssm.macs_per_token - attention.macs_per_token)
    kv = 2 * config.kv_size * 2
    return Figures(
        base_parameters=sum(map(math.prod, base_shapes(config).values())),
        delta_parameters=sum(map(math.prod, delta_shapes(config).values())),
        state_bytes_per_block=state,
        kv_bytes_per_token_per_block=kv,
        break_even_memory=state // kv + 1,
        break_even_decode=math.floor(extra / attention.macs_per_key) + 1,
        # A prompt's tokens see (n + 1) / 2 keys on average.
        break_even_prefill=max(1, math.floor(2 * extra / attention.macs_per_key)),
        rows=tuple(_row(config, n, kv, state) for n in contexts(config.max_context)),
    )


def contexts(longest: int) -> list[int]:
    """512, doubled up to the model's context, which is the last."""
    found: list[int] = []
    n = 512
    while n < longest and len(found) < 9:
        found.append(n)
        n *= 2
    return [*found, longest]


def _row(config: ModelConfig, n: int, kv: int, state: int) -> ContextRow:
    attention, ssm = mixer_work(config, CPU_RATES)
    kinds = config.block_kinds
    free = kinds.count("adaptive")

    def macs(in_attention: float, keys: float) -> float:
        rest = config.num_blocks - in_attention
        mlp = 3 * config.hidden_size * config.intermediate_size * config.num_blocks
        mixers = in_attention * (attention.macs_per_token + keys * attention.macs_per_key) + rest * ssm.macs_per_token
        return mlp + mixers

    head = config.vocab_size * config.hidden_size
    fixed, most = kinds.count("attention"), kinds.count("attention") + free
    return ContextRow(
        context=n,
        attention=2 * (macs(most, n) + head),
        half=2 * (macs(fixed + free / 2, n) + head),
        ssm=2 * (macs(fixed, n) + head),
        prefill_saved=1 - macs(fixed, (n + 1) / 2) / macs(most, (n + 1) / 2),
        attention_bytes=most * n * kv + (config.num_blocks - most) * state,
        ssm_bytes=fixed * n * kv + (config.num_blocks - fixed) * state,
    )
