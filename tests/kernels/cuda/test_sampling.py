"""The device's draws are the host's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from morph.engine.params import SamplingParams
from morph.engine.sampling import draw, uniform
from morph.kernels.cuda.sampling import Draws, draw_tokens
from tests.kernels.cuda.device import DEVICE

PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.5, min_p=0.05),
    SamplingParams(temperature=2.0, min_p=0.2),
    SamplingParams(temperature=1e-4),
    SamplingParams(temperature=0.0),
]


@pytest.mark.parametrize("position", range(8))
def test_draws_equal_the_host(position: int) -> None:
    logits = 3 * torch.randn(len(PARAMS), 777)
    logits[1, 10:20] = 4.0  # ties across the limit of top-k
    rows = [(p.temperature, p.top_k or 0, p.top_p, p.min_p, uniform(7 + i, position)) for i, p in enumerate(PARAMS)]
    got = draw_tokens(logits.to(DEVICE), Draws.of(rows, DEVICE), sort=True).tolist()
    for i, params in enumerate(PARAMS):
        request = SimpleNamespace(params=params, seed=7 + i, num_tokens=position)
        want = int(logits[i].argmax()) if params.temperature == 0 else draw(logits[i].numpy(), request)
        assert got[i] == want, params


def test_draws_without_sorting_equal_those_with() -> None:
    logits = torch.randn(64, 301, device=DEVICE)
    draws = Draws.of([(1.0, 0, 1.0, 0.1, uniform(i, 3)) for i in range(64)], DEVICE)
    assert torch.equal(draw_tokens(logits, draws, sort=False), draw_tokens(logits, draws, sort=True))


def test_broken_logits_give_no_token() -> None:
    logits = torch.randn(3, 50, device=DEVICE)
    logits[1] = float("nan")
    logits[2, 7] = float("inf")
    draws = Draws.of([(t, 0, 1.0, 0.0, 0.5) for t in (0.0, 1.0, 0.0)], DEVICE)
    assert draw_tokens(logits, draws, sort=False).tolist() == [int(logits[0].argmax()), -1, -1]
