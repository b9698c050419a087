"""Drawing is exact: the same token as a sort of the whole vocabulary in float64 gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from morph import LLM, SamplingParams
from morph.engine.sampling import _argmax, draw, uniform


def plain_draw(logits: torch.Tensor, params: SamplingParams, u: float) -> int:
    """The definition, with a full sort and in float64."""
    values, ids = logits.double(), torch.arange(logits.numel())
    top_k = params.top_k if params.top_k < len(values) else 0
    if top_k or params.top_p < 1:
        values, ids = torch.sort(values, descending=True, stable=True)
    if top_k:
        values, ids = values[:top_k], ids[:top_k]
    probs = torch.softmax(values / params.temperature, dim=-1)
    before = probs.cumsum(-1) - probs
    probs = torch.where(before < params.top_p, probs, 0.0)
    probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    cdf = probs.cumsum(-1)
    return int(ids[int(torch.searchsorted(cdf, u * float(cdf[-1]), right=True))])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 7},
        {"top_k": 5000},
        {"top_p": 0.9},
        {"top_p": 0.2},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.1},
    ],
)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_those_of_the_definition(fields: dict[str, Any], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, **fields)
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 3
    logits[50:60] = logits.max() - 1  # equal ones
    misses = 0
    for seed in range(200):
        request: Any = SimpleNamespace(params=params, seed=seed, num_tokens=9)
        misses += draw(logits.numpy(), request) != plain_draw(logits, params, uniform(seed, 9))
    # float32 against float64 may differ where u falls on the border of two tokens, once in about 10^6 draws.
    assert misses == 0


def test_extreme_logits_and_temperatures_still_give_a_token() -> None:
    rows = [
        torch.zeros(64),
        torch.tensor([3.4e38, -3.4e38, 0.0, 3.4e38]),
        torch.tensor([0.0, float("-inf"), 0.0]),
    ]
    for row in rows:
        for fields in ({}, {"top_k": 2}, {"top_p": 1e-12}, {"top_p": 0.999999}, {"min_p": 1.0}):
            for temperature in (1e-300, 1e-3, 100.0):
                params = SamplingParams(temperature=temperature, **fields)  # type: ignore[arg-type]
                request: Any = SimpleNamespace(params=params, seed=3, num_tokens=1)
                assert torch.isfinite(row[draw(row.numpy(), request)])


def test_the_likeliest_token_is_the_first_of_equal_ones_and_broken_rows_have_none() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, float("nan"), 0.0], [float("inf"), 0.0, 0.0], [-1.0, -2.0, -0.5]])
    assert _argmax(logits) == [1, None, None, 2]
    assert _argmax(torch.full((1, 4), float("-inf"))) == [None]
    assert np.array_equal(_argmax(torch.eye(5)), range(5))


def test_a_penalty_that_overflows_is_that_request_s_own_affair(tiny_folder: Any) -> None:
    llm = LLM(tiny_folder, dtype="float32", max_requests=4, memory_bytes=8 << 20)
    odd = [
        SamplingParams(max_tokens=5, ignore_eos=True, layout="ssm", repetition_penalty=value, **more)
        for value in (1e-45, 1e38)
        for more in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5})
    ]
    plain = SamplingParams(max_tokens=5, ignore_eos=True, layout="ssm")
    outputs = llm.generate([[1, 2, 3]] * 7, [*odd, plain])
    assert [len(output.token_ids) for output in outputs] == [5] * 7
    assert outputs[-1].token_ids == llm.generate([[1, 2, 3]], plain)[0].token_ids
