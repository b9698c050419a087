"""Baselines spend what the gates spend, and have the layouts that they are said to have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from morph.config import ModelConfig
from morph.errors import InvalidRequest
from morph.evaluate.layouts import (
    Requests,
    Spec,
    assign,
    evenly_placed,
    expand_oracle,
    params_of,
    parse_specs,
    static_at_cost,
    undecided,
)
from morph.gate.calibrate import budget_of
from tests.tiny import tiny_config

BLOCKS = 12


def config(kinds: tuple[str, ...] = ()) -> ModelConfig:
    return tiny_config(num_blocks=BLOCKS, block_kinds=kinds)


def requests(count: int, seed: int = 0, short: int = 0) -> Requests:
    """Requests with growing savings; the first `short` have none."""
    generator = torch.Generator().manual_seed(seed)
    saved = torch.rand(count, 1, generator=generator) * 3 + 0.2
    saved = saved.expand(-1, BLOCKS).clone()
    saved[:short] *= -1
    lengths = [100 if i < short else 2000 for i in range(count)]
    return Requests([f"r{i}" for i in range(count)], lengths, saved)


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 40), st.floats(0, 1), st.integers(0, 3), st.integers(0, 5))
def test_static_layouts_meet_the_cost_to_within_one_block_of_one_request(
    count: int, target: float, short: int, seed: int
) -> None:
    given_ = requests(count, seed, short)
    ranking = list(range(BLOCKS))[::-1]
    layouts = static_at_cost(config(), given_, ranking, target)
    step = float(given_.saved.max()) / float(given_.saved.clamp_min(0).sum())
    assert abs(budget_of(layouts, given_.saved) - target) <= step
    # Nested by the ranking: two neighbouring counts at most among the requests with a choice, attention for the rest.
    assert bool(layouts[:short].all())
    counts = layouts[short:].sum(1).tolist()
    assert max(counts) - min(counts) <= 1
    for row, number in zip(layouts[short:], counts, strict=True):
        assert row.nonzero().flatten().tolist() == sorted(ranking[: int(number)])


def test_static_takes_the_spending_of_auto_at_the_same_budget() -> None:
    given_ = requests(30)
    gated = torch.rand(30, BLOCKS, generator=torch.Generator().manual_seed(3)) < 0.3
    layouts = assign(Spec.parse("static:0.5"), config(), given_, list(range(BLOCKS)), {0.5: gated})
    assert layouts is not None
    assert budget_of(layouts, given_.saved) == pytest.approx(budget_of(gated, given_.saved), abs=0.01)
    alone = assign(Spec.parse("static:0.5"), config(), given_, list(range(BLOCKS)), {})
    assert alone is not None
    assert budget_of(alone, given_.saved) == pytest.approx(0.5, abs=0.01)


def test_shuffled_layouts_are_the_gates_own_at_other_requests() -> None:
    given_ = requests(20)
    gated = torch.rand(20, BLOCKS, generator=torch.Generator().manual_seed(3)) < 0.5
    shuffled = assign(Spec.parse("shuffled:0.5"), config(), given_, None, {0.5: gated})
    assert shuffled is not None
    assert sorted(map(tuple, shuffled.tolist())) == sorted(map(tuple, gated.tolist()))
    assert not torch.equal(shuffled, gated)


def test_every_baseline_takes_attention_where_it_is_cheaper_but_ssm_does_not() -> None:
    given_ = requests(6, short=2)
    for name in ("static:0.25", "alternating", "nemotron:2", "random:0.25", "chain:1"):
        layouts = assign(Spec.parse(name), config(), given_, list(range(BLOCKS)), {})
        assert layouts is not None and bool(layouts[:2].all()), name
        assert not bool(layouts[2:].all()), name
    ssm = assign(Spec.parse("ssm"), config(), given_, None, {})
    assert ssm is not None and not bool(ssm.any())
    assert undecided(config(), given_.saved).tolist() == [False, False, True, True, True, True]


def test_static_blocks_keep_their_mixer_under_every_layout() -> None:
    kinds = ("attention", "ssm", *("adaptive",) * (BLOCKS - 2))
    shape = config(kinds)
    for name in ("attention", "ssm", "static:0.3", "alternating", "nemotron:3", "random:0.5"):
        layouts = assign(Spec.parse(name), shape, requests(5), list(range(BLOCKS)), {})
        assert layouts is not None
        assert bool(layouts[:, 0].all()) and not bool(layouts[:, 1].any()), name


def test_evenly_placed_blocks_keep_their_distance() -> None:
    assert evenly_placed(12, 3).nonzero().flatten().tolist() == [2, 6, 10]
    assert int(evenly_placed(30, 30).sum()) == 30


def test_random_layouts_depend_on_the_item_alone() -> None:
    many, few = requests(10), requests(4)
    spec = Spec.parse("random:0.5")
    a, b = assign(spec, config(), many, None, {}), assign(spec, config(), few, None, {})
    assert a is not None and b is not None
    assert torch.equal(a[:4], b) and a.sum(1).tolist() == [6] * 10


def test_specs_run_in_an_order_in_which_each_has_what_it_needs() -> None:
    names = [spec.name for spec in parse_specs("static:0.5, shuffled:0.25,ssm")]
    assert names == ["attention", "ssm", "auto:0.25", "static:0.5", "shuffled:0.25"]
    assert [spec.name for spec in parse_specs("auto:0.50,auto:0.5")] == ["attention", "auto:0.5"]
    expanded, items = expand_oracle(parse_specs("oracle:7"), config())
    assert items == 7 and [s.name for s in expanded][1:] == [f"chain:{k}" for k in (0, 2, 3, 6, 9, 12)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gated", "unknown"),
        ("auto", "needs a budget"),
        ("auto:1.5", "0…1"),
        ("auto:x", "0…1"),
        ("ssm:1", "takes none"),
        ("chain:1.5", "whole number"),
        ("", "no layout"),
    ],
)
def test_a_wrong_spec_is_named(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse_specs(text)


def test_bits_of_another_length_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="3 blocks, the model has 12"):
        assign(Spec.parse("101"), config(), requests(2), None, {})


def test_parameters_carry_the_layout_or_the_budget() -> None:
    assert params_of(Spec.parse("auto:0.3"), None).attention_budget == 0.3
    assert params_of(Spec.parse("alternating"), torch.tensor([True, False])).layout == "10"
