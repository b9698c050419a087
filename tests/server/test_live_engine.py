"""The server over a real engine: answers over HTTP are the engine's, and a client that leaves frees what it held."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from benchmarks.client import Endpoint, first_model, run_requests
from morph import SamplingParams
from morph.config import EngineConfig
from morph.engine.async_engine import AsyncEngine
from morph.server.app import create_app
from tests.server.test_clients import wait_for


@pytest.fixture
def served(tiny_folder: Path) -> Iterator[tuple[str, AsyncEngine]]:
    config = EngineConfig(dtype="float32", max_requests=4, memory_bytes=16 << 20, poison=True)
    engine = AsyncEngine.from_model(tiny_folder, config)
    engine.start()
    server = uvicorn.Server(uvicorn.Config(create_app(engine), port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", engine
    server.should_exit = True
    thread.join(10)
    engine.stop()


def body(engine: AsyncEngine, **fields: Any) -> dict[str, Any]:
    return {"model": engine.model_name, "ignore_eos": True, "morph": {"layout": "ssm"}, **fields}


def test_streamed_answers_are_those_of_the_engine(served: tuple[str, AsyncEngine]) -> None:
    url, engine = served

    async def alone(prompt: list[int]) -> str:
        params = SamplingParams(max_tokens=60, ignore_eos=True, layout="ssm")
        outputs = [output async for output in engine.generate(prompt, params)]
        return outputs[-1].text

    async def streamed(client: httpx.AsyncClient, prompt: list[int]) -> str:
        text = ""
        fields = body(engine, prompt=prompt, max_tokens=60, stream=True, temperature=0)
        async with client.stream("POST", url + "/v1/completions", json=fields) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def run() -> None:
        prompts = [[1, 2, 3 + i] for i in range(6)]
        async with httpx.AsyncClient(timeout=30) as client:
            texts = await asyncio.gather(*(streamed(client, prompt) for prompt in prompts))
        assert texts == [await alone(prompt) for prompt in prompts]

    asyncio.run(run())


def test_a_client_that_leaves_frees_its_slot_and_memory(served: tuple[str, AsyncEngine]) -> None:
    url, engine = served
    fields = body(engine, prompt=[1, 2, 3], max_tokens=500, stream=True)
    for _ in range(3):
        with httpx.stream("POST", url + "/v1/completions", json=fields, timeout=30) as response:
            next(response.iter_lines())
    # The counters are read beside the running loop: between "nothing runs" and "all is free" lies a moment.
    wait_for(lambda: engine.stats()["free_slots"] == 4)
    wait_for(lambda: engine.stats()["units_free"] == engine.stats()["units_total"])
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0
    assert engine.stats()["aborted"] == 3 and engine.alive


def test_the_load_client_reads_the_server(served: tuple[str, AsyncEngine]) -> None:
    url, _ = served
    endpoint = Endpoint(url, asyncio.run(first_model(url)), {"morph": {"layout": "ssm"}})
    timings = asyncio.run(run_requests(endpoint, [[1, 2, i] for i in range(5)], 30, 3))
    assert [timing.output_tokens for timing in timings] == [30] * 5
    for timing in timings:
        assert 0 < timing.ttft <= timing.e2e and timing.tpot > 0
        assert 2 <= timing.events <= 31
        assert timing.morph is not None and timing.morph["layout"] == "0000"
