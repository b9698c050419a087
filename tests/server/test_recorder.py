"""What the dashboard is told: live requests, percentiles, a bounded history; never a prompt or an answer."""

from __future__ import annotations

import json

import httpx
import pytest

from morph.engine.params import SamplingParams
from morph.server.recorder import FINISHED, HISTORY, Recorder, block_shares, percentiles
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_history_is_bounded_and_sampled_at_intervals() -> None:
    clock = Clock()
    recorder = Recorder(FakeEngine(), clock)
    for _ in range(3 * HISTORY):
        clock.now += 0.5
        recorder.sample()
        recorder.sample()
    assert len(recorder.history) == HISTORY
    assert len(recorder.snapshot(clock.now - 1.0)["history"]) == 2
    assert recorder.snapshot()["history"][0]["share"] is None


def test_percentiles_and_block_shares() -> None:
    assert percentiles([]) is None
    assert percentiles([0.3, 0.1, 0.2]) == {"p50": 0.2, "p90": 0.3, "p99": 0.3}
    assert block_shares(["1100", "1000"], 4) == [1.0, 0.5, 0.0, 0.0]


def test_many_requests_are_counted_not_all_shown() -> None:
    recorder = Recorder(FakeEngine(), Clock())
    for number in range(130):
        recorder.begin(f"r{number}", 3, SamplingParams())
    snapshot = recorder.snapshot()
    assert len(snapshot["requests"]) == 100 and snapshot["not_shown"] == 30
    for number in range(130):
        recorder.end(f"r{number}", "abort")
        recorder.end(f"r{number}", "abort")
    assert recorder.snapshot()["finished"] == 130 and len(recorder.ended) <= FINISHED


def test_requests_whose_ids_end_alike_are_told_apart() -> None:
    recorder = Recorder(FakeEngine(), Clock())
    for request_id in ("chatcmpl-0000face-0", "chatcmpl-1111face-0"):
        recorder.begin(request_id, 3, SamplingParams())
    assert len({request["id"] for request in recorder.snapshot()["requests"]}) == 2


async def test_state_after_a_request(client: httpx.AsyncClient) -> None:
    body = {"model": "fake-1", "messages": [{"role": "user", "content": "my secret"}], "stream": True}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    state = (await client.get("/morph/state")).json()
    assert state["model"] == "fake-1" and state["blocks"] == 4 and state["gates"]
    assert state["finished"] == 1 and state["requests"] == [] and state["ttft"]["p50"] > 0
    assert state["memory"] == {"attention": 30, "ssm": 10, "free": 60} and state["memory_total"] == 100
    assert "secret" not in json.dumps(state) and "Hello" not in json.dumps(state)


async def test_the_page_and_its_files(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.status_code == 200 and "<title>Morph</title>" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("dashboard.css", "dashboard.js"):
        assert (await client.get(f"/dashboard/{name}")).status_code == 200
        assert f"/dashboard/{name}" in page.text
    answer = await client.get("/dashboard/app.py")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
    assert "http://" not in page.text and "https://" not in page.text
