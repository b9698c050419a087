"""The batched chunk form against the sequential oracle."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from morph.kernels.gated_delta import sequential_gated_delta_rule
from morph.kernels.gated_delta.batched import batched_chunk_rule


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("similar", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_equals_the_oracle(tokens: int, similar: bool, with_state: bool) -> None:
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(2, tokens, 3, 16) for _ in range(3))
    if similar:
        k = torch.randn(2, 1, 3, 16) + 0.01 * k
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    g, beta = F.logsigmoid(torch.randn(2, tokens, 3) + 3), torch.sigmoid(torch.randn(2, tokens, 3))
    initial = torch.randn(2, 3, 16, 16) if with_state else None
    doubles = [x.double() for x in (q, k, v, g, beta)]
    want, want_state = sequential_gated_delta_rule(*doubles, None if initial is None else initial.double())
    got, state = batched_chunk_rule(q, k, v, g, beta, initial)
    assert (got - want).abs().max() < 1e-5 * max(1.0, float(want.abs().max()))
    assert (state - want_state).abs().max() < 1e-5 * max(1.0, float(want_state.abs().max()))
