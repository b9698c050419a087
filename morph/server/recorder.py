"""What the dashboard shows: requests that live, the last that ended, and a bounded history of the engine's gauges.

Everything here runs in the server's event loop. A delivery costs a few assignments; gauges are read only while somebody
watches, and then at most every `INTERVAL_S`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from morph.engine.params import RequestOutput, SamplingParams
from morph.server.interface import ServedEngine

INTERVAL_S = 0.5
HISTORY = 240
"""Samples kept: two minutes."""
FINISHED = 500
"""Ended requests kept for the percentiles."""
SHOWN = 100
"""Live requests in one snapshot; more are counted."""


@dataclass
class Live:
    """One request on its way; `layout` is None while its blocks are undecided."""

    id: str
    arrival: float
    prompt_tokens: int
    tokens: int = 0
    layout: str | None = None
    source: str | None = None
    budget: float | None = None
    ttft: float | None = None


@dataclass(frozen=True)
class Ended:
    """Figures of an ended request, seconds."""

    layout: str | None
    ttft: float | None
    tpot: float | None
    reason: str


class Recorder:
    """Follows the requests of one engine.

    Args:
        engine: whose gauges are sampled.
        clock: seconds that only go forward.
    """

    def __init__(self, engine: ServedEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine, self.clock = engine, clock
        self.live: dict[str, Live] = {}
        self.ended: deque[Ended] = deque(maxlen=FINISHED)
        self.total = 0
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._sampled = -1e9

    # ---- requests

    def begin(self, request_id: str, prompt_tokens: int, params: SamplingParams) -> None:
        """A request was queued."""
        self.live[request_id] = Live(request_id, self.clock(), prompt_tokens, budget=params.attention_budget)

    def update(self, request_id: str, item: RequestOutput | Exception) -> None:
        """An output, or the exception that ended the request."""
        live = self.live.get(request_id)
        if live is None:
            return
        if isinstance(item, Exception):
            self.end(request_id, "error")
            return
        live.tokens = len(item.token_ids)
        live.layout, live.source, live.ttft = item.layout, item.layout_source, item.ttft
        live.budget = item.attention_budget
        if item.finished:
            tpot = None
            if item.e2e is not None and item.ttft is not None and live.tokens > 1:
                tpot = (item.e2e - item.ttft) / (live.tokens - 1)
            self.end(request_id, str(item.finish_reason), tpot)

    def end(self, request_id: str, reason: str, tpot: float | None = None) -> None:
        """The request is over; nothing happens when it is not known."""
        live = self.live.pop(request_id, None)
        if live is not None:
            self.total += 1
            self.ended.append(Ended(live.layout, live.ttft, tpot, reason))

    # ---- snapshots

    def sample(self) -> None:
        """Add the gauges of now to the history, unless that was done just before."""
        now = self.clock()
        if now - self._sampled < INTERVAL_S * 0.9:
            return
        self._sampled = now
        stats = self.engine.stats()
        layouts = [live.layout for live in self.live.values() if live.layout is not None]
        self.history.append(
            {
                "at": round(now, 2),
                "running": stats["running"],
                "waiting": stats["waiting"],
                "share": mean(layout.count("1") / len(layout) for layout in layouts) if layouts else None,
                "blocks": block_shares(layouts, self.engine.config.num_blocks) if layouts else None,
            }
        )

    def snapshot(self, since: float = -1.0) -> dict[str, Any]:
        """What a page draws; of the history only what is newer than `since`."""
        now = self.clock()
        stats = self.engine.stats()
        shown = list(self.live.values())[:SHOWN]
        return {
            "now": round(now, 2),
            "alive": self.engine.alive,
            "requests": [
                {
                    "id": live.id,
                    "seconds": round(now - live.arrival, 1),
                    "prompt_tokens": live.prompt_tokens,
                    "tokens": live.tokens,
                    "layout": live.layout,
                    "source": live.source,
                    "budget": live.budget,
                }
                for live in shown
            ],
            "not_shown": len(self.live) - len(shown),
            "finished": self.total,
            "running": stats["running"],
            "waiting": stats["waiting"],
            "preemptions": stats["preemptions"],
            "distinct_layouts": stats.get("distinct_layouts", 0),
            "memory": {
                kind: stats[f"units_{kind}"]
                for kind in ("attention", "ssm", "cached", "free")
                if f"units_{kind}" in stats
            },
            "memory_total": stats["units_total"],
            "ttft": percentiles([e.ttft for e in self.ended if e.ttft is not None]),
            "tpot": percentiles([e.tpot for e in self.ended if e.tpot is not None]),
            "history": [entry for entry in self.history if entry["at"] > since],
        }


def mean(values: Any) -> float:
    """Arithmetic mean, to 4 digits."""
    numbers = list(values)
    return round(sum(numbers) / len(numbers), 4)


def block_shares(layouts: Sequence[str], blocks: int) -> list[float]:
    """Per block the share of the layouts that run attention there."""
    return [mean(layout[block] == "1" for layout in layouts) for block in range(blocks)]


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99 in seconds (nearest rank), None without values."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"p{p}": round(ordered[min(last, int(len(ordered) * p / 100))], 5) for p in (50, 90, 99)}
