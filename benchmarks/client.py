"""A load client for OpenAI-compatible `/v1/completions`: streams tokens and times them.

One connection per request, read by `benchmarks.exchange`: a general HTTP client costs several times the CPU per
streamed token, which a server on the same machine would pay for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.exchange import RequestFailed, exchange


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
        first_tokens: output tokens that came with the first event: as the server counted them, if it counts along
            with each event, else 1.
        events: how many events brought the tokens; fewer than tokens when some came together.
        morph: the `morph` object of the answer (layout and where it came from), if it has one.
    """

    started: float
    ttft: float
    e2e: float
    input_tokens: int
    output_tokens: int
    morph: Mapping[str, Any] | None = None
    first_tokens: int = 1
    events: int = 0

    @property
    def tpot(self) -> float:
        """Seconds per output token after those of the first event; 0 when there are no others."""
        return (self.e2e - self.ttft) / max(self.output_tokens - self.first_tokens, 1)


async def first_model(url: str, api_key: str | None = None) -> str:
    """Name of the first model that the server lists."""
    lines: list[bytes] = []

    def take(line: bytes) -> bool:
        lines.append(line)
        return False

    await exchange(url, "GET", "/v1/models", take, api_key=api_key)
    return str(json.loads(b"".join(lines))["data"][0]["id"])


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
    answer = _Answer(endpoint.url)
    started = time.perf_counter()
    await exchange(endpoint.url, "POST", "/v1/completions", answer.take, body, endpoint.api_key)
    counts = (answer.usage.get("prompt_tokens"), answer.usage.get("completion_tokens"))
    if answer.first is None or answer.last is None or counts != (len(prompt), max_tokens):
        raise RequestFailed(
            f"{endpoint.url} counted {counts} tokens in and out, "
            f"asked for {(len(prompt), max_tokens)}: it must honour ignore_eos and include_usage"
        )
    return Timing(
        started,
        answer.first - started,
        answer.last - started,
        len(prompt),
        max_tokens,
        answer.morph,
        answer.first_tokens,
        answer.events,
    )


class _Answer:
    """What the events of one streamed answer say."""

    def __init__(self, url: str) -> None:
        self.usage: dict[str, Any] = {}
        self.morph: dict[str, Any] | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.first_tokens = 1
        self.events = 0
        self._url = url

    def take(self, line: bytes) -> bool:
        """One line of the stream; True after the last."""
        if not line.startswith(b"data:"):
            return False
        now = time.perf_counter()
        data = line[5:].strip()
        if data == b"[DONE]":
            return True
        event = json.loads(data)
        if "error" in event:
            raise RequestFailed(f"{self._url}: {event['error']}")
        usage = event.get("usage")
        # An event without choices carries only the usage.
        if event.get("choices"):
            if self.first is None:
                self.first = now
                if usage:
                    self.first_tokens = max(1, usage.get("completion_tokens") or 1)
            self.last = now
            self.events += 1
        self.usage = usage or self.usage
        self.morph = event.get("morph") or self.morph
        return False


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
