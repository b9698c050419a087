"""How far an evaluation is, and how long it will still take."""

from __future__ import annotations

import time

from rich.console import Console

from morph.durations import clock


class Progress:
    """One line that is rewritten on a terminal; in a log, a line at most every `interval` seconds.

    Args:
        total: tokens of all work, done before or not. done: tokens of what was found finished.
    """

    def __init__(self, total: float, done: float = 0.0, console: Console | None = None, interval: float = 20.0) -> None:
        self.total, self.done, self.interval = total, done, interval
        self.console = console or Console(stderr=True)
        self._begun, self._began_at, self._shown = done, time.monotonic(), -interval
        self._status = self.console.status("") if self.console.is_terminal else None
        if self._status is not None:
            self._status.start()

    def left(self) -> float | None:
        """Seconds until the end at the rate of this run, None before anything is done."""
        made = self.done - self._begun
        if made <= 0:
            return None
        return (self.total - self.done) / made * (time.monotonic() - self._began_at)

    def skip(self, tokens: float) -> None:
        """Count work that was found finished: it says nothing about this run's speed."""
        self.done += tokens
        self._begun += tokens

    def advance(self, tokens: float, text: str) -> None:
        """Count finished work; `text` says what is being done."""
        self.done += tokens
        left = self.left()
        share = self.done / self.total if self.total else 1.0
        line = f"{share:4.0%}  {text}" + ("" if left is None else f"  {clock(left)} left")
        if self._status is not None:
            self._status.update(line)
        elif time.monotonic() - self._shown >= self.interval:
            self._shown = time.monotonic()
            self.console.print(line, highlight=False)

    def close(self) -> None:
        """Take the line away."""
        if self._status is not None:
            self._status.stop()
