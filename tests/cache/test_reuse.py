"""Cached equals uncached, for every kind of hit (invariant 4)."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from morph import LLM, SamplingParams
from morph.engine.params import RequestOutput
from tests.invariants.test_invariants import assert_same, prompt, small_llm
from tests.tiny import tiny_model

LAYOUTS = ("1111", "0000", "0110", "1001")


@pytest.fixture(scope="module", params=[(0, "q"), (64, "kv")], ids=["plain", "window"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    window, heads = request.param
    return tiny_model(tmp_path_factory.mktemp("reuse") / "m", window=window, state_heads=heads)


def pair(folder: Path, **options: Any) -> tuple[LLM, LLM]:
    """One engine with a cache, one without."""
    return small_llm(folder, cache_share=1.0, **options), small_llm(folder, cache_share=0.0, **options)


def run(llm: LLM, tokens: list[int], **params: Any) -> RequestOutput:
    values: dict[str, Any] = {"max_tokens": 6, "logprobs": 2, "ignore_eos": True}
    out = llm.generate([tokens], SamplingParams(**(values | params)))[0]
    llm.engine.check()
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [40, 129])
def test_the_same_prompt_twice_is_a_hit_of_all_but_one_token(folder: Path, layout: str, length: int) -> None:
    cached, plain = pair(folder)
    tokens = prompt(1, length)
    first, second = run(cached, tokens, layout=layout), run(cached, tokens, layout=layout)
    assert (first.cached_tokens, second.cached_tokens) == (0, length - 1)
    alone = run(plain, tokens, layout=layout)
    assert_same(alone, first)
    assert_same(alone, second)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_turn_starts_at_the_end_of_the_answer(folder: Path, layout: str) -> None:
    cached, plain = pair(folder)
    tokens, fed = prompt(2, 100), 0
    for turn in range(3):
        answer = run(cached, tokens, layout=layout)
        assert_same(run(plain, tokens, layout=layout), answer)
        assert answer.cached_tokens == fed
        # The answer's last token was not fed.
        fed = len(tokens) + len(answer.token_ids) - 1
        tokens = tokens + answer.token_ids + prompt(10 + turn, 30)


def test_a_place_where_prompts_part_becomes_a_checkpoint(folder: Path) -> None:
    cached, plain = pair(folder)
    shared = prompt(3, 150)
    outs = []
    for i in range(3):
        tokens = shared + prompt(20 + i, 20)
        outs.append(run(cached, tokens, layout="0110"))
        assert_same(run(plain, tokens, layout="0110"), outs[-1])
    # The second sees that it shares 150 tokens with the first and leaves a checkpoint; the third starts there.
    assert [out.cached_tokens for out in outs] == [0, 0, 150]


def test_keys_longer_than_the_state_are_no_hit_beyond_the_state(folder: Path) -> None:
    cached, plain = pair(folder)
    tokens = prompt(4, 120)
    run(cached, tokens, layout="1000")
    longer = tokens[:110] + prompt(5, 40)
    out = run(cached, longer, layout="1000")
    assert out.cached_tokens == 0
    assert_same(run(plain, longer, layout="1000"), out)


def test_all_attention_is_cut_back_to_any_shared_prefix(folder: Path) -> None:
    cached, plain = pair(folder)
    tokens = prompt(6, 120)
    run(cached, tokens, layout="attention")
    for shared in (33, 64, 110):
        other = tokens[:shared] + prompt(30 + shared, 40)
        other[shared] = (tokens[shared] + 1) % 256
        out = run(cached, other, layout="attention")
        assert out.cached_tokens == shared
        assert_same(run(plain, other, layout="attention"), out)


def test_another_layout_is_a_miss(folder: Path) -> None:
    cached, plain = pair(folder)
    tokens = prompt(7, 90)
    run(cached, tokens, layout="0110")
    out = run(cached, tokens, layout="0111")
    assert out.cached_tokens == 0
    assert_same(run(plain, tokens, layout="0111"), out)


def test_message_ends_are_checkpoints(folder: Path) -> None:
    cached, plain = pair(folder)
    system = [*prompt(8, 99), 299]
    run(cached, system + prompt(40, 80), layout="0011")
    tokens = system + prompt(41, 50)
    out = run(cached, tokens, layout="0011")
    assert out.cached_tokens == 100
    assert_same(run(plain, tokens, layout="0011"), out)


def test_gates_decide_the_same_from_a_hit(folder: Path) -> None:
    cached, plain = pair(folder)
    shared = prompt(9, 200)
    layouts = set()
    for i in range(8):
        tokens = shared + prompt(50 + i, 30)
        for budget in (0.3, 0.5):
            out = run(cached, tokens, attention_budget=budget)
            assert_same(run(plain, tokens, attention_budget=budget), out)
            assert out.layout_source == "gate"
            layouts.add(out.layout)
    stats = cached.engine.stats()
    assert stats["cache_hit"] and stats["cache_hit_tokens"] > 200
    again = run(cached, tokens, attention_budget=0.5)
    assert again.cached_tokens == len(tokens) - 1, "a prompt's own layout is remembered"
    assert_same(out, again)


def test_affinity_adopts_a_stored_layout_and_says_so(folder: Path) -> None:
    cached, plain = pair(folder)
    shared = prompt(11, 200)
    sources = []
    for i in range(10):
        tokens = shared + prompt(70 + i, 30)
        out = run(cached, tokens, cache_affinity=1e9)
        sources.append(out.layout_source)
        same = run(plain, tokens, layout=str(out.layout))
        same.layout_source = out.layout_source
        assert_same(same, out)
    assert set(sources) <= {"gate", "cache"}
    none = run(cached, shared + prompt(99, 30), cache_affinity=0.0)
    assert none.layout_source == "gate"
    assert none.layout == run(plain, shared + prompt(99, 30)).layout


def test_a_cache_under_pressure_changes_nothing(folder: Path) -> None:
    cached, plain = pair(folder, memory_bytes=1 << 20, max_requests=3)
    shared = prompt(12, 100)
    prompts = [shared[: 40 + 10 * (i % 6)] + prompt(80 + i, 20 + i) for i in range(18)]
    params = [
        SamplingParams(max_tokens=8, logprobs=2, ignore_eos=True, layout=LAYOUTS[i % 4]) for i in range(len(prompts))
    ]
    for one, two in zip(plain.generate(prompts, params), cached.generate(prompts, params), strict=True):
        assert_same(one, two)
    cached.engine.check()
    assert cached.engine.stats()["cache_evicted"] > 0


def test_scoring_starts_from_the_context(folder: Path) -> None:
    cached, plain = pair(folder)
    contexts, choices = [prompt(13, 120)], [[prompt(90 + i, 5 + i) for i in range(4)]]
    one = plain.score(contexts, choices)[0]
    two = [cached.score(contexts, [[choice]])[0][0] for choice in choices[0]]
    assert [score.layout for score in one] == [score.layout for score in two]
    for a, b in zip(one, two, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=2e-4 * len(b.tokens))
    assert cached.engine.stats()["cache_hit"] == 3


def test_an_abort_in_prefill_leaves_nothing_half_written(folder: Path) -> None:
    cached, plain = pair(folder, prefill_tokens=16)
    tokens = prompt(14, 150)
    engine = cached.engine
    for stop in range(4):
        busy = engine.make_request(f"busy-{stop}", prompt(15, 20), SamplingParams(max_tokens=50, ignore_eos=True))
        doomed = engine.make_request(f"doomed-{stop}", tokens, SamplingParams(layout="0110"))
        engine.add(busy)
        engine.step()
        engine.add(doomed)
        for _ in range(stop + 1):
            engine.step()
        engine.abort(doomed.id)
        engine.abort(busy.id)
        engine.check()
    assert_same(run(plain, tokens, layout="0110"), run(cached, tokens, layout="0110"))


def test_preempted_requests_resume_from_what_they_published(folder: Path) -> None:
    cached, plain = pair(folder, memory_bytes=1 << 20, max_requests=4)
    prompts = [prompt(100 + i, 60) for i in range(4)]
    params = SamplingParams(max_tokens=60, logprobs=2, ignore_eos=True, layout="1011")
    for one, two in zip(plain.generate(prompts, params), cached.generate(prompts, params), strict=True):
        assert_same(one, two)
    cached.engine.check()


def test_tenants_share_nothing(folder: Path) -> None:
    cached, _ = pair(folder)
    tokens = prompt(16, 80)
    run(cached, tokens, layout="0110", cache_salt="a")
    assert run(cached, tokens, layout="0110", cache_salt="b").cached_tokens == 0
    assert run(cached, tokens, layout="0110", cache_salt="a").cached_tokens == 79


def test_random_traffic_with_reuse(folder: Path) -> None:
    cached, plain = pair(folder, memory_bytes=2 << 20, max_requests=4)
    rng = torch.Generator().manual_seed(5)
    stems = [prompt(200 + i, 150) for i in range(3)]
    for _ in range(4):
        prompts, params = [], []
        for _ in range(8):
            stem = stems[int(torch.randint(0, 3, (), generator=rng))]
            cut = int(torch.randint(20, 150, (), generator=rng))
            tail = torch.randint(0, 256, (int(torch.randint(1, 40, (), generator=rng)),), generator=rng).tolist()
            prompts.append(stem[:cut] + tail)
            layout = [*LAYOUTS, "auto", "auto"][int(torch.randint(0, 6, (), generator=rng))]
            params.append(SamplingParams(max_tokens=7, logprobs=2, ignore_eos=True, layout=layout))
        for one, two in zip(plain.generate(prompts, params), cached.generate(prompts, params), strict=True):
            assert_same(one, two)
    assert cached.engine.stats()["cache_hit"] > 2


def test_requests_that_begin_alike_wait_for_the_first_one(folder: Path) -> None:
    llm, cold = pair(folder, memory_bytes=16 << 20, max_requests=8)
    rng = random.Random(5)
    text = [rng.randrange(256) for _ in range(300)]
    prompts = [text + [rng.randrange(256) for _ in range(20 + i)] for i in range(5)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=4, layout="0101"))
    assert [output.cached_tokens for output in outputs] == [0, 300, 300, 300, 300]
    for asked, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == cold.generate([asked], SamplingParams(max_tokens=4, layout="0101"))[0].token_ids
    llm.engine.check()


def test_followers_go_on_when_their_leader_is_aborted(folder: Path) -> None:
    llm, _ = pair(folder, memory_bytes=16 << 20, max_requests=8)
    engine = llm.engine
    engine.engine_config = replace(engine.engine_config, prefill_tokens=1)
    params = SamplingParams(max_tokens=4, layout="0101")
    requests = [engine.make_request(str(i), [7] * 300 + [i] * 10, params) for i in range(3)]
    running = engine.make_request("other", [1, 2, 3], params)
    engine.add(running)
    engine.step()
    for request in requests:
        engine.add(request)
    engine.step()
    assert requests[1].leader is requests[0] and requests[2].leader is requests[0]
    engine.abort("0")
    while not engine.idle:
        engine.step()
    assert all(request.finish_reason == "length" for request in requests[1:])
    engine.check()
