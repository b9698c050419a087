"""Chunked and recurrent gated delta rule against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

from morph.kernels.gated_delta.reference import (
    chunk_gated_delta_rule,
    l2_normalise,
    recurrent_gated_delta_rule,
    sequential_gated_delta_rule,
)

LENGTHS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 200, 300]


def inputs(length: int, similar: bool, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta for two sequences of three heads of 32."""
    rng = torch.Generator().manual_seed(seed + length)
    shape = (2, length, 3, 32)
    q = l2_normalise(torch.randn(shape, generator=rng))
    k = torch.randn(shape, generator=rng)
    if similar:
        k = torch.randn((2, 1, 3, 32), generator=rng) + 1e-3 * k
    v = torch.randn(shape, generator=rng)
    g = torch.nn.functional.logsigmoid(torch.randn(shape[:3], generator=rng) + 3)
    beta = torch.sigmoid(torch.randn(shape[:3], generator=rng))
    return q, l2_normalise(k), v, g, beta


@pytest.mark.parametrize("rule", [chunk_gated_delta_rule, recurrent_gated_delta_rule])
@pytest.mark.parametrize("similar", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_equals_the_oracle(rule: object, similar: bool, with_state: bool, length: int) -> None:
    q, k, v, g, beta = inputs(length, similar)
    state = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)) if with_state else None
    want, want_state = sequential_gated_delta_rule(q, k, v, g, beta, state)
    got, got_state = rule(q, k, v, g, beta, state)  # type: ignore[operator]
    scale = want.abs().max().clamp_min(1)
    assert (got - want).abs().max() / scale < 1e-5
    assert (got_state - want_state).abs().max() / want_state.abs().max().clamp_min(1) < 1e-5


def test_gradients_flow_through_the_chunked_form() -> None:
    tensors = [t.requires_grad_() for t in inputs(70, similar=False)]
    out, state = chunk_gated_delta_rule(*tensors)
    (out.sum() + state.sum()).backward()
    assert all(t.grad is not None and torch.isfinite(t.grad).all() for t in tensors)
