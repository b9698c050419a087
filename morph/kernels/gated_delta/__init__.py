"""Gated delta rule: the oracle, the recurrence and the differentiable chunked form."""

from morph.kernels.gated_delta.reference import (
    causal_conv,
    chunk_gated_delta_rule,
    l2_normalise,
    recurrent_gated_delta_rule,
    sequential_gated_delta_rule,
)

__all__ = [
    "causal_conv",
    "chunk_gated_delta_rule",
    "l2_normalise",
    "recurrent_gated_delta_rule",
    "sequential_gated_delta_rule",
]
