"""FLOPs that a hit saves: what an entry is worth."""

from __future__ import annotations

from collections.abc import Sequence

from morph.config import ModelConfig
from morph.gate.cost import CPU_RATES, mixer_work


class PrefillCost:
    """FLOPs of prefill by length and layout, from the model's shape (multiply-adds count as two)."""

    def __init__(self, config: ModelConfig) -> None:
        self.attention, self.ssm = mixer_work(config, CPU_RATES)
        self.blocks = config.num_blocks
        self.mlp = 3 * config.hidden_size * config.intermediate_size

    def flops(self, attention_blocks: int, tokens: int) -> float:
        """Of a prompt of `tokens` tokens whose layout has so many attention blocks; the head is not counted."""
        ssm_blocks = self.blocks - attention_blocks
        linear = attention_blocks * self.attention.macs_per_token + ssm_blocks * self.ssm.macs_per_token
        keys = 0.5 * tokens * (tokens + 1) * attention_blocks * self.attention.macs_per_key
        return 2.0 * (tokens * (linear + self.blocks * self.mlp) + keys)

    def saved(self, bits: Sequence[bool], tokens: int, beyond: int = 0) -> float:
        """FLOPs that a hit of `tokens` tokens saves over one of `beyond` tokens."""
        count = sum(map(bool, bits))
        return self.flops(count, tokens) - self.flops(count, beyond)
