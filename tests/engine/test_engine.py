"""Requests on their way through the engine: stops, sampling, scoring, bad input, aborts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from morph import LLM, SamplingParams
from morph.config import EngineConfig
from morph.engine.async_engine import AsyncEngine
from morph.engine.detokenizer import Detokenizer
from morph.engine.sampling import uniform
from morph.errors import InvalidRequest, OutOfMemory


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    return LLM(tiny_folder, dtype="float32", max_requests=4, memory_bytes=8 << 20, poison=True)


class Letters:
    """Token i is the i-th letter; 26 is the first half of a two-token character."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        data = b"".join(b"\xc3" if i == 26 else b"\xa9" if i == 27 else bytes([97 + i]) for i in ids)
        return data.decode("utf-8", errors="replace")


def test_a_character_of_two_tokens_comes_out_whole() -> None:
    detokenizer = Detokenizer(Letters(), ())
    texts = []
    for token in (0, 26, 27, 1):
        detokenizer.push(token)
        texts.append(detokenizer.text)
    assert texts == ["a", "a", "aé", "aéb"]


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(Letters(), ("bcd",))
    assert [detokenizer.push(t) for t in (0, 1, 2)] == [None, None, None]
    assert detokenizer.text == "a"
    assert detokenizer.push(4) is None
    assert detokenizer.text == "abce"
    assert [detokenizer.push(t) for t in (1, 2, 3)][-1] == "bcd"
    detokenizer.finish(stopped=True)
    assert detokenizer.text == "abce"


def test_the_counter_rng_depends_on_seed_and_position_alone() -> None:
    assert uniform(5, 9) == uniform(5, 9)
    assert uniform(5, 9) != uniform(5, 10) != uniform(6, 9)
    draws = [uniform(3, i) for i in range(4000)]
    assert abs(sum(draws) / len(draws) - 0.5) < 0.02 and min(draws) >= 0 and max(draws) < 1


def test_stops_by_length_token_string_and_end_token(llm: LLM) -> None:
    greedy = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, layout="ssm", ignore_eos=True))[0]
    assert greedy.finish_reason == "length" and len(greedy.token_ids) == 8
    stop_at = greedy.token_ids[3]
    first = greedy.token_ids.index(stop_at)
    params = SamplingParams(max_tokens=8, layout="ssm", ignore_eos=True, stop_token_ids=(stop_at,))
    out = llm.generate([[5, 6, 7]], params)[0]
    assert out.finish_reason == "stop" and out.token_ids == greedy.token_ids[: first + 1]
    biased = SamplingParams(max_tokens=8, layout="ssm", logit_bias={299: 100.0})
    out = llm.generate([[5, 6, 7]], biased)[0]
    assert out.finish_reason == "stop" and out.token_ids == [299] and out.text == ""


def test_top_k_one_is_greedy_and_seeds_repeat(llm: LLM) -> None:
    greedy = llm.generate([[1, 2]], SamplingParams(max_tokens=6, layout="ssm", ignore_eos=True))[0]
    for changes in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        params = SamplingParams(max_tokens=6, layout="ssm", temperature=2.0, ignore_eos=True, **changes)  # type: ignore[arg-type]
        assert llm.generate([[1, 2]], params)[0].token_ids == greedy.token_ids
    params = SamplingParams(max_tokens=12, layout="ssm", temperature=3.0, seed=4, ignore_eos=True)
    assert llm.generate([[1, 2]], params)[0].token_ids == llm.generate([[1, 2]], params)[0].token_ids


def test_sampling_follows_the_distribution(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=1, layout="ssm", temperature=1.0, seed=i, logprobs=5) for i in range(400)]
    outs = llm.generate([[9, 8]] * 400, params)
    assert outs[0].logprobs is not None
    token, logprob = outs[0].logprobs[0].top[0]
    share = sum(out.token_ids[0] == token for out in outs) / 400
    assert abs(share - float(torch.tensor(logprob).exp())) < 0.1


@pytest.mark.parametrize(
    "prompt,params,word",
    [
        ([], {}, "empty"),
        ([1] * 600, {}, "context"),
        ([1], {"max_tokens": 5000}, "max_tokens"),
        ([9999], {}, "vocabulary"),
        ([1], {"layout": "11"}, "blocks"),
        ([1], {"layout": "11x1"}, "block 2"),
        ([1], {"gate_tokens": 5}, "gate_tokens"),
        ([1], {"logit_bias": {5000: 1.0}}, "logit_bias"),
    ],
)
def test_bad_requests_name_the_value(llm: LLM, prompt: list[int], params: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        llm.generate([prompt], SamplingParams(**params))  # type: ignore[arg-type]
    llm.engine.check()


@pytest.mark.parametrize(
    "values",
    [{"max_tokens": -1}, {"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"attention_budget": 1.5}],
)
def test_bad_parameters_are_refused_where_they_are_made(values: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(values))):
        SamplingParams(**values)  # type: ignore[arg-type]


def test_a_pool_too_small_says_so(tiny_folder: Path) -> None:
    with pytest.raises(OutOfMemory, match="at least"):
        LLM(tiny_folder, dtype="float32", memory_bytes=4096)


def test_a_broken_row_fails_alone(llm: LLM) -> None:
    # Poisoned weights of one request's state: its logits are NaN, its neighbour's are not.
    engine = llm.engine
    good = engine.make_request("good", [1, 2, 3], SamplingParams(max_tokens=6, layout="ssm", ignore_eos=True))
    bad = engine.make_request("bad", [4, 5, 6], SamplingParams(max_tokens=6, layout="ssm", ignore_eos=True))
    engine.add(good)
    engine.add(bad)
    engine.step()
    units = engine.runner.tables.units(bad.slot, 0)
    engine.admission.pool.storage[torch.from_numpy(units).long()] = 0xFF
    while not engine.idle:
        engine.step()
    assert bad.finish_reason == "error" and good.finish_reason == "length"
    engine.check()


def test_leaving_a_stream_early_frees_everything(tiny_folder: Path) -> None:
    config = EngineConfig(dtype="float32", max_requests=4, memory_bytes=8 << 20, poison=True)
    engine = AsyncEngine.from_model(tiny_folder, config)
    engine.start()

    async def leave_early() -> int:
        count = 0
        async for _ in engine.generate([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True)):
            count += 1
            if count == 3:
                break
        return count

    async def both() -> None:
        await asyncio.gather(*(leave_early() for _ in range(6)))
        for _ in range(200):
            stats = engine.stats()
            if stats["units_free"] == stats["units_total"] and stats["running"] == 0:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"not freed: {engine.stats()}")

    try:
        asyncio.run(both())
        assert engine.alive
    finally:
        engine.stop()
