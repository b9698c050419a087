"""How many blocks of a cohort fit between two decode steps, from what the last ones took on the device."""

from __future__ import annotations

import torch


class Pace:
    """Bounds the time that decoding requests wait for prefill.

    Args:
        limit_s: the longest wait, seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._rate: float | None = None
        self._pending: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None

    def blocks(self, rows: int) -> int | None:
        """Blocks of a cohort of `rows` rows that fit into the limit, at least 1; None while nothing was measured."""
        self._collect()
        return None if self._rate is None else max(1, int(self.limit_s / (self._rate * max(1, rows))))

    def start(self) -> torch.cuda.Event:
        """Mark the begin of a group of blocks."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self, begin: torch.cuda.Event, rows: int, blocks: int) -> None:
        """Mark its end; the time is read later, when the device is through, so nothing waits here."""
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._pending = (begin, end, rows * blocks)

    def observe(self, seconds: float, row_blocks: int) -> None:
        """Take a measured time of `row_blocks` rows times blocks into account; rises at once, falls slowly."""
        rate = seconds / max(1, row_blocks)
        self._rate = rate if self._rate is None else max(rate, 0.8 * self._rate + 0.2 * rate)

    def _collect(self) -> None:
        if self._pending is not None and self._pending[1].query():
            begin, end, work = self._pending
            self._pending = None
            self.observe(begin.elapsed_time(end) / 1e3, work)
