"""The engine in its thread: outputs reach their readers in order, with one waking of the loop per step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from morph import SamplingParams
from morph.config import EngineConfig
from morph.engine import async_engine
from morph.engine.async_engine import AsyncEngine, Item, Mailbox
from morph.engine.params import RequestOutput
from morph.errors import EngineDead, InvalidRequest

CONFIG = EngineConfig(dtype="float32", max_requests=4, memory_bytes=8 << 20, poison=True)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, layout="ssm")


@pytest.fixture
def engine(tiny_folder: Path) -> Iterator[AsyncEngine]:
    engine = AsyncEngine.from_model(tiny_folder, CONFIG)
    engine.start()
    yield engine
    engine.stop()


async def read(engine: AsyncEngine, prompt: list[int], params: SamplingParams = PARAMS) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params)]


def test_deltas_add_up_to_the_answer(engine: AsyncEngine) -> None:
    outputs = asyncio.run(read(engine, [1, 2, 3]))
    last = outputs[-1]
    assert len(last.token_ids) == 40 and last.finish_reason == "length"
    assert [token for output in outputs for token in output.delta_token_ids] == last.token_ids
    assert "".join(output.delta_text for output in outputs) == last.text
    assert [len(output.token_ids) for output in outputs] == sorted({len(output.token_ids) for output in outputs})
    assert all(output.prompt_token_ids == [1, 2, 3] and output.layout == "0000" for output in outputs)


def test_a_step_wakes_the_loop_at_most_once(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        calls = 0
        plain = loop.call_soon_threadsafe

        def counted(*args: Any, **more: Any) -> asyncio.Handle:
            nonlocal calls
            calls += 1
            return plain(*args, **more)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        begin = engine.stats()["steps"]
        answers = await asyncio.gather(*(read(engine, [7, number]) for number in range(4)))
        assert all(len(outputs[-1].token_ids) == 40 for outputs in answers)
        return calls, engine.stats()["steps"] - begin

    calls, steps = asyncio.run(run())
    assert 0 < calls <= steps < 4 * 40


def test_a_loop_that_is_busy_finds_everything_in_order_later(engine: AsyncEngine) -> None:
    items: list[Item] = []

    async def run() -> None:
        engine.submit([5, 6], PARAMS, "one", items.append)
        # The loop is held up for longer than the whole answer takes; the engine goes on meanwhile.
        done = threading.Event()
        while not done.wait(0.005):
            if engine.stats()["finished"] == 1:
                break
        assert items == []
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    outputs = [item for item in items if isinstance(item, RequestOutput)]
    assert outputs[-1].finished and len(outputs) == len(items)
    assert [token for output in outputs for token in output.delta_token_ids] == outputs[-1].token_ids


def test_a_reader_that_does_not_read_stalls_nobody(engine: AsyncEngine) -> None:
    async def run() -> None:
        slow = engine.generate([1, 2], PARAMS)
        await anext(slow)
        outputs = await asyncio.wait_for(read(engine, [3, 4]), 20)
        assert len(outputs[-1].token_ids) == 40
        rest = [output async for output in slow]
        assert len(rest[-1].token_ids) == 40

    asyncio.run(run())


def test_who_wants_the_whole_answer_gets_one_output(engine: AsyncEngine) -> None:
    async def run() -> None:
        items: list[Item] = []
        news = asyncio.Event()

        def deliver(item: Item) -> None:
            items.append(item)
            news.set()

        engine.submit([1, 2, 3], PARAMS, "whole", deliver, whole=True)
        await asyncio.wait_for(news.wait(), 20)
        (output,) = items
        expected = (await read(engine, [1, 2, 3]))[-1]
        assert isinstance(output, RequestOutput) and output.finished
        assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
        assert output.delta_token_ids == output.token_ids and output.delta_text == output.text

    asyncio.run(run())


def test_a_reader_that_fails_keeps_nothing_from_the_others(engine: AsyncEngine) -> None:
    def broken(item: Item) -> None:
        raise RuntimeError("a reader's bug")

    async def run() -> None:
        engine.submit([9], PARAMS, "broken", broken)
        assert len((await read(engine, [3, 4]))[-1].token_ids) == 40

    asyncio.run(run())
    assert engine.alive


def test_a_bad_request_is_refused_at_once_and_delivers_nothing(engine: AsyncEngine) -> None:
    items: list[Item] = []

    async def run() -> None:
        with pytest.raises(InvalidRequest, match="empty"):
            engine.submit([], PARAMS, "bad", items.append)
        await read(engine, [1])

    asyncio.run(run())
    assert items == []


def test_stopping_ends_every_request_with_an_error(engine: AsyncEngine) -> None:
    async def run() -> None:
        stream = engine.generate([1, 2], SamplingParams(max_tokens=500, ignore_eos=True, layout="ssm"))
        await anext(stream)
        await asyncio.to_thread(engine.stop)
        with pytest.raises(EngineDead, match="stopped"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDead, match="not running"):
            await read(engine, [1])

    asyncio.run(run())


def test_a_closed_loop_is_no_concern_of_the_engine(engine: AsyncEngine) -> None:
    async def leave() -> None:
        engine.submit([1, 2], PARAMS, "left behind", lambda item: None)

    asyncio.run(leave())
    assert len(asyncio.run(read(engine, [3, 4]))[-1].token_ids) == 40
    assert engine.alive


def test_news_posted_while_the_loop_looks_are_not_lost() -> None:
    seen: list[Item] = []
    total = 20_000

    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        output = RequestOutput("x", [])

        def post() -> None:
            for _ in range(total):
                mailbox.post([(seen.append, output)])

        thread = threading.Thread(target=post)
        thread.start()
        for _ in range(2000):
            await asyncio.sleep(0.005)
            if len(seen) == total:
                break
        thread.join()

    asyncio.run(run())
    assert len(seen) == total


def test_the_model_is_loaded_in_a_thread_that_has_ended(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    load = async_engine.load_engine

    def watched(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return load(*args)

    monkeypatch.setattr(async_engine, "load_engine", watched)
    AsyncEngine.from_model(tiny_folder, CONFIG)
    assert threads[0] is not threading.current_thread() and not threads[0].is_alive()
    with pytest.raises(InvalidRequest, match="float16"):
        AsyncEngine.from_model(tiny_folder, EngineConfig(dtype="float16"))
