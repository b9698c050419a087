"""A load client for OpenAI-compatible `/v1/completions`: streams tokens and times them.

It speaks HTTP/1.1 over asyncio streams, one connection per request. A general HTTP client costs several
times the CPU per streamed token, which a server on the same machine would pay for.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_LINE_BYTES = 2**22


class RequestFailed(RuntimeError):
    """The server did not answer as the benchmark needs."""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server.

    Attributes:
        url: address up to, and without, `/v1`.
        model: name to ask for.
        extra: further fields of each request, for instance `{"morph": {"layout": "attention"}}`.
        api_key: bearer token, or None.
    """

    url: str
    model: str
    extra: Mapping[str, Any]
    api_key: str | None = None


@dataclass(frozen=True)
class Timing:
    """Times of one request, seconds from before the connection is opened.

    Attributes:
        started: on the clock of `time.perf_counter`.
        ttft: to the first token.
        e2e: to the last token.
        input_tokens, output_tokens: as the server counted them.
        morph: the `morph` object of the answer (layout and where it came from), if it has one.
    """

    started: float
    ttft: float
    e2e: float
    input_tokens: int
    output_tokens: int
    morph: Mapping[str, Any] | None = None

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 when there is only one."""
        return (self.e2e - self.ttft) / max(self.output_tokens - 1, 1)


async def _open(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str, str]:
    """Connection to the server of `url`, its host header and its path without a closing slash."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    context = ssl.create_default_context() if secure else None
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context, limit=MAX_LINE_BYTES)
    return reader, writer, parts.netloc, parts.path.rstrip("/")


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Pieces of a response body, as they come."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    else:
        remaining = int(headers.get("content-length", -1))
        while remaining and (piece := await reader.read(65536)):
            remaining -= len(piece)
            yield piece


async def _request(endpoint: Endpoint, method: str, path: str, body: Any = None) -> AsyncIterator[bytes]:
    """Lines of the response body of one HTTP request.

    Raises:
        RequestFailed: the status is not 200.
        OSError: no connection, or it broke.
    """
    reader, writer, host, prefix = await _open(endpoint.url)
    try:
        payload = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{method} {prefix}{path} HTTP/1.1",
            f"Host: {host}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(payload)}",
        ]
        if endpoint.api_key is not None:
            head.append(f"Authorization: Bearer {endpoint.api_key}")
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + payload)
        await writer.drain()
        raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(raw[0].split()[1])
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in raw[1:] if line)
        }
        pending = b""
        if status != 200:
            async for piece in _body(reader, headers):
                pending += piece
            answer = pending.decode(errors="replace")[:500]
            raise RequestFailed(f"{method} {path} of {endpoint.url} gave {status}: {answer}")
        async for piece in _body(reader, headers):
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                yield line
        if pending:
            yield pending
    finally:
        writer.close()


async def first_model(url: str, api_key: str | None = None) -> str:
    """Name of the first model that the server lists."""
    endpoint = Endpoint(url, "", {}, api_key)
    answer = b"".join([line async for line in _request(endpoint, "GET", "/v1/models")])
    return str(json.loads(answer)["data"][0]["id"])


async def complete(endpoint: Endpoint, prompt: Sequence[int], max_tokens: int) -> Timing:
    """Complete one prompt greedily with exactly `max_tokens` tokens and time it.

    Raises:
        RequestFailed: an error status or event, or other token counts than asked for (a server that
            stops early or cuts the prompt is not comparable).
    """
    body = {
        "model": endpoint.model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.extra,
    }
    usage: dict[str, Any] = {}
    morph: dict[str, Any] | None = None
    first = last = None
    started = time.perf_counter()
    async for line in _request(endpoint, "POST", "/v1/completions", body):
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter()
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise RequestFailed(f"{endpoint.url}: {event['error']}")
        # An event without choices carries only the usage.
        if event.get("choices"):
            first = first or now
            last = now
        usage = event.get("usage") or usage
        morph = event.get("morph") or morph
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if first is None or last is None or counts != (len(prompt), max_tokens):
        raise RequestFailed(
            f"{endpoint.url} counted {counts} tokens in and out, "
            f"asked for {(len(prompt), max_tokens)}: it must honour ignore_eos and include_usage"
        )
    return Timing(started, first - started, last - started, len(prompt), max_tokens, morph)


async def run_requests(
    endpoint: Endpoint, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int
) -> list[Timing]:
    """Complete all prompts, `concurrency` at a time (closed loop); timings in the order of the prompts."""
    timings: list[Timing | None] = [None] * len(prompts)
    waiting = iter(range(len(prompts)))

    async def worker() -> None:
        # The workers share one iterator: each takes the next prompt when its last one has ended.
        for index in waiting:
            timings[index] = await complete(endpoint, prompts[index], max_tokens)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(prompts))):
                group.create_task(worker())
    except ExceptionGroup as failures:
        # One message is enough: the others fail for the same reason or because the first did.
        raise failures.exceptions[0] from None
    return [timing for timing in timings if timing is not None]


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation between the two nearest values (numpy's default)."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarise(timings: Sequence[Timing]) -> dict[str, float]:
    """Figures of the timed requests of one row: tokens per second over the window from the first send
    to the last token, and p50 and p99 of ttft, tpot and e2e in seconds."""
    wall = max(t.started + t.e2e for t in timings) - min(t.started for t in timings)
    outputs = sum(t.output_tokens for t in timings)
    figures = {
        "wall_s": wall,
        "total_tokens_per_s": (outputs + sum(t.input_tokens for t in timings)) / wall,
        "output_tokens_per_s": outputs / wall,
    }
    for name in ("ttft", "tpot", "e2e"):
        values = [getattr(timing, name) for timing in timings]
        figures[f"{name}_p50_s"] = percentile(values, 50)
        figures[f"{name}_p99_s"] = percentile(values, 99)
    return figures
