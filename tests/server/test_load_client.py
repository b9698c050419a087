"""The benchmarks' client against scripted servers: any cutting of the bytes, several tokens per event, failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.client import Endpoint, Timing, complete
from benchmarks.exchange import RequestFailed

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def sse(*events: Any) -> list[bytes]:
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value}], **more}


def usage(count: int) -> dict[str, int]:
    return {"prompt_tokens": 2, "completion_tokens": count}


def chunk(data: bytes) -> bytes:
    return b"%x;ext=1\r\n%b\r\n" % (len(data), data)


DONE = b"data: [DONE]\n\n"
LAST = {"choices": [], "usage": usage(4), "morph": {"layout": "01"}}


def ask(pieces: Sequence[bytes], pause: float = 0.0, tokens: int = 4) -> Timing:
    """What the client makes of a server that sends these pieces and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause)
        writer.close()

    async def run() -> Timing:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await asyncio.wait_for(complete(Endpoint(f"http://127.0.0.1:{port}", "m", {}), [1, 2], tokens), 20)

    return asyncio.run(run())


def test_any_cutting_of_the_bytes_reads_the_same() -> None:
    events = [*sse(text("a"), text("é\\n"), text("c"), text("d"), LAST), DONE]
    stream = CHUNKED + b"".join(map(chunk, events)) + b"0\r\n\r\n"
    for size in (1, 2, 7, 64, len(stream)):
        timing = ask([stream[i : i + size] for i in range(0, len(stream), size)])
        assert (timing.output_tokens, timing.events, timing.morph) == (4, 4, {"layout": "01"})
    joined = b"".join(events)
    halves = CHUNKED + chunk(joined[:41]) + chunk(joined[41:]) + b"0\r\n\r\n"
    assert ask([halves]).events == 4


@pytest.mark.parametrize("length", [True, False])
def test_bodies_that_are_not_chunked_are_read_too(length: bool) -> None:
    joined = b"".join([*sse(text("a"), text("bcd"), LAST), DONE])
    head = b"HTTP/1.1 200 OK\r\n" + (b"Content-Length: %d\r\n" % len(joined) if length else b"") + b"\r\n"
    timing = ask([head, joined[:30], joined[30:]])
    assert (timing.output_tokens, timing.events) == (4, 2)


def test_tokens_that_come_together_count_by_the_server_s_usage() -> None:
    events = sse(text("abc", usage=usage(3)), text("d", usage=usage(4)), LAST)
    timing = ask([CHUNKED, *map(chunk, events), chunk(DONE)], pause=0.05)
    assert (timing.first_tokens, timing.output_tokens, timing.events) == (3, 4, 2)
    # One token came after the first event, 50 ms later.
    assert timing.tpot == pytest.approx(timing.e2e - timing.ttft) and timing.tpot >= 0.045


def test_without_counts_along_the_way_the_first_event_counts_as_one_token() -> None:
    timing = ask([CHUNKED, *map(chunk, sse(text("a"), text("bcd"), LAST)), chunk(DONE)], pause=0.03)
    assert timing.first_tokens == 1
    assert timing.tpot == pytest.approx((timing.e2e - timing.ttft) / 3)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([b"HTTP/1.1 429 Busy\r\nContent-Length: 9\r\n\r\nqueue ful"], "429: queue ful"),
        ([CHUNKED, *map(chunk, sse({"error": {"message": "broken"}}))], "broken"),
        ([CHUNKED, *map(chunk, sse(text("a"), {"choices": [], "usage": usage(1)})), chunk(DONE)], "ignore_eos"),
    ],
)
def test_failures_are_told(pieces: list[bytes], message: str) -> None:
    with pytest.raises(RequestFailed, match=message):
        ask(pieces)


def test_an_answer_that_breaks_off_is_an_error() -> None:
    with pytest.raises(ConnectionError, match="mid-answer"):
        ask([CHUNKED, *map(chunk, sse(text("a")))])
