"""The invariants of the design, on tiny models in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from morph import LLM, SamplingParams
from morph.engine.params import RequestOutput
from tests.tiny import tiny_model

BOUND = 1e-4
"""Largest difference between logits of equal requests in float32 (log probabilities: twice that)."""


def small_llm(folder: Path, **options: Any) -> LLM:
    values: dict[str, Any] = {"dtype": "float32", "max_requests": 6, "memory_bytes": 8 << 20, "poison": True}
    return LLM(folder, **(values | options))


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    return small_llm(tiny_folder)


def prompt(seed: int, length: int) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=rng).tolist()


def assert_same(one: RequestOutput, two: RequestOutput) -> None:
    """Equal layout and tokens; a token may differ only where the solo margin lies below the bound."""
    assert one.layout == two.layout
    assert one.logprobs is not None and two.logprobs is not None
    for a, b in zip(one.logprobs, two.logprobs, strict=False):
        assert abs(a.logprob - b.logprob) < 2 * BOUND or a.token_id != b.token_id
        if a.token_id != b.token_id:
            margin = a.top[0][1] - a.top[1][1]
            assert margin < 2 * BOUND, f"token differs at a margin of {margin}"
            return
    assert one.token_ids == two.token_ids


def solo(llm: LLM, tokens: list[int], params: SamplingParams) -> RequestOutput:
    return llm.generate([tokens], params)[0]


def test_all_attention_is_the_base_bit_for_bit(llm: LLM, tmp_path: Path) -> None:
    base = small_llm(tiny_model(tmp_path / "base", ssm=False))
    params = SamplingParams(max_tokens=12, logprobs=5, ignore_eos=True, layout="attention")
    prompts = [prompt(i, n) for i, n in enumerate((3, 40, 150))]
    for hybrid, plain in zip(llm.generate(prompts, params), base.generate(prompts, params), strict=True):
        assert hybrid.token_ids == plain.token_ids
        assert hybrid.logprobs == plain.logprobs


@pytest.mark.parametrize("window,state_heads", [(0, "q"), (0, "kv"), (64, "q"), (64, "kv")])
def test_engine_equals_the_reference_model(tmp_path: Path, window: int, state_heads: str) -> None:
    from morph.checkpoint import open_model
    from morph.model.model import MorphModel

    folder = tiny_model(tmp_path / "m", window=window, state_heads=state_heads)
    engine = small_llm(folder)
    source = open_model(folder)
    model = MorphModel(source.config)
    model.load_source(source)
    for bits in ("1111", "0000", "0110"):
        tokens = prompt(3, 130)
        out = engine.generate([tokens], SamplingParams(max_tokens=6, layout=bits, logprobs=1, ignore_eos=True))[0]
        whole = torch.tensor([tokens + out.token_ids])
        layout = torch.tensor([bit == "1" for bit in bits])
        with torch.no_grad():
            logits = model(whole, layout)
        logits = logits[0] if isinstance(logits, tuple) else logits
        logprobs = torch.log_softmax(logits.reshape(-1, logits.shape[-1])[len(tokens) - 1 : -1].float(), dim=-1)
        assert out.logprobs is not None
        for row, entry in zip(logprobs, out.logprobs, strict=True):
            assert abs(float(row[entry.token_id]) - entry.logprob) < 1e-3


request_strategy = st.tuples(
    st.integers(0, 10_000),
    st.integers(1, 180),
    st.integers(1, 12),
    st.sampled_from(["auto", "attention", "ssm", "0101", "1100"]),
    st.sampled_from([0.0, 0.8]),
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests=st.lists(request_strategy, min_size=2, max_size=7))
def test_tokens_do_not_depend_on_company(llm: LLM, requests: list[tuple[int, int, int, str, float]]) -> None:
    prompts = [prompt(seed, n) for seed, n, *_ in requests]
    params = [
        SamplingParams(max_tokens=m, layout=lay, temperature=t, seed=seed, logprobs=2, ignore_eos=True)
        for seed, _, m, lay, t in requests
    ]
    together = llm.generate(prompts, params)
    for tokens, one, out in zip(prompts, params, together, strict=True):
        assert_same(solo(llm, tokens, one), out)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    arrivals=st.lists(st.tuples(request_strategy, st.integers(0, 6)), min_size=2, max_size=7),
    aborts=st.sets(st.tuples(st.integers(0, 6), st.integers(0, 12)), max_size=3),
)
def test_schedules_aborts_and_preemption_change_nothing(
    tiny_folder: Path, llm: LLM, arrivals: list[Any], aborts: set[tuple[int, int]]
) -> None:
    # A pool so small that requests must yield to each other.
    tight = _tight(tiny_folder)
    engine = tight.engine
    pending = sorted(enumerate(arrivals), key=lambda item: item[1][1])
    made: dict[int, Any] = {}
    step = 0
    while pending or not engine.idle:
        while pending and pending[0][1][1] <= step:
            index, ((seed, n, m, lay, t), _) = pending.pop(0)
            params = SamplingParams(max_tokens=m, layout=lay, temperature=t, seed=seed, logprobs=2, ignore_eos=True)
            made[index] = engine.make_request(f"r{index}", prompt(seed, n), params)
            engine.add(made[index])
        for index, at in aborts:
            if at == step and index in made:
                engine.abort(f"r{index}")
        engine.step()
        step += 1
        assert step < 2000
    engine.check()
    for index, request in made.items():
        if request.finish_reason == "abort":
            continue
        (seed, n, _, _, _), _ = arrivals[index]
        assert_same(solo(llm, prompt(seed, n), request.params), request.output(4))


_TIGHT: dict[Path, LLM] = {}


def _tight(folder: Path) -> LLM:
    if folder not in _TIGHT:
        # One unit is 4 KB; the largest request of the strategy needs 4 blocks x 2 heads x 12 pages = 96 units.
        _TIGHT[folder] = small_llm(folder, memory_bytes=110 * 4096, prefill_tokens=32, cohort_tokens=200)
    return _TIGHT[folder]


def test_preemption_happens_and_keeps_the_layout(tiny_folder: Path, llm: LLM) -> None:
    tight = _tight(tiny_folder)
    before = tight.engine.scheduler.counters.preemptions
    params = SamplingParams(max_tokens=60, layout="attention", logprobs=2, ignore_eos=True)
    prompts = [prompt(i, 60) for i in range(3)]
    outs = tight.generate(prompts, params)
    assert tight.engine.scheduler.counters.preemptions > before
    for tokens, out in zip(prompts, outs, strict=True):
        assert_same(solo(llm, tokens, params), out)


def test_layouts_differ_between_prompts_and_never_change(llm: LLM) -> None:
    engine = llm.engine
    seen = set()
    for i in range(6):
        request = engine.make_request(f"x{i}", prompt(i, 30 + 20 * i), SamplingParams(max_tokens=10, ignore_eos=True))
        engine.add(request)
        layouts = set()
        while not engine.idle:
            engine.step()
            layout = request.layout(4)
            if layout is not None:
                layouts.add(str(layout))
        assert len(layouts) == 1
        seen |= layouts
    assert len(seen) > 1, "the tiny gates should tell prompts apart"


def test_memory_is_proportional_to_the_layout(llm: LLM) -> None:
    tables = llm.engine.runner.tables
    tokens = prompt(1, 100)
    for bits in ("1111", "0000", "0100", "1101"):
        params = SamplingParams(max_tokens=4, layout=bits, ignore_eos=True)
        request = llm.engine.make_request(f"m{bits}", tokens, params)
        llm.engine.add(request)
        llm.engine.step()
        held = tables.held(request.slot)
        attention = bits.count("1")
        assert held["attention"] == attention * tables.layout.attention_units(101)
        assert held["ssm"] == (4 - attention) * tables.layout.state_units
        while not llm.engine.idle:
            llm.engine.step()
        llm.engine.check()


def test_scores_share_the_contexts_layout_and_match_generation(llm: LLM) -> None:
    context = prompt(5, 50)
    out = solo(llm, context, SamplingParams(max_tokens=4, logprobs=1, ignore_eos=True))
    scores = llm.score([context], [[out.token_ids, prompt(6, 4), prompt(7, 9)]])[0]
    assert {score.layout for score in scores} == {out.layout}
    assert scores[0].is_greedy
    assert out.logprobs is not None
    assert scores[0].logprob == pytest.approx(sum(entry.logprob for entry in out.logprobs), abs=1e-3)


def test_budget_one_is_all_attention_and_zero_is_the_cheapest(llm: LLM) -> None:
    tokens = prompt(2, 80)
    assert solo(llm, tokens, SamplingParams(max_tokens=1, attention_budget=1.0)).layout == "1111"
    assert solo(llm, tokens, SamplingParams(max_tokens=1, attention_budget=0.0)).layout == "0000"
