"""What a run says while it runs: a line every few steps, and the same as JSON lines in a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from morph.durations import clock
from morph.train.config import StageConfig
from morph.train.snapshot import Position


class Progress:
    """Collects losses on the device between two reports, so that a step needs no synchronisation.

    Args:
        say: prints a line. log: file that gets JSON lines; None = none. Both only in the first process.
    """

    def __init__(self, say: Callable[[str], None], log: Path | None) -> None:
        self.say, self.log = say, log
        self.step_seconds = 0.0
        self.reset()

    def reset(self) -> None:
        """Begin a new window."""
        self._losses: list[torch.Tensor] = []
        self._norms: list[torch.Tensor] = []
        self._tokens, self._begin = 0, time.monotonic()

    def add(self, losses: torch.Tensor, norm: torch.Tensor, tokens: int) -> None:
        """One step: its losses `[n]` and gradient norm, on the device, and its token passes."""
        self._losses.append(losses)
        self._norms.append(norm)
        self._tokens += tokens

    def losses(self) -> torch.Tensor:
        """Mean over the window, on the device."""
        return torch.stack(self._losses).mean(0)

    def largest_norm(self) -> float:
        """Of the window; NaN when any is."""
        return float(torch.stack(self._norms).max())

    def report(self, position: Position, config: StageConfig, losses: dict[str, float], rate: float) -> None:
        """Print and log a line; call after the losses have been read, so that the device has finished."""
        seconds = max(1e-9, time.monotonic() - self._begin)
        speed = self._tokens / seconds
        self.step_seconds = seconds / len(self._losses)
        left = sum(
            config.rows(step) * config.length(step) * config.passes for step in range(position.step, config.steps)
        )
        shown = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
        self.say(
            f"{position.stage} {position.step}/{config.steps}  {shown}  lr {rate:.2e}  {speed / 1e3:.1f}k tokens/s  "
            f"{clock(left / speed)} left"
        )
        self._write(
            {
                "stage": position.stage, "step": position.step, **losses, "lr": rate, "tokens_per_second": speed,
                "length": config.length(position.step - 1), "gradient_norm": self.largest_norm(),
                "tokens": position.tokens,
            }
        )  # fmt: skip

    def evaluation(self, position: Position, by_count: dict[str, float]) -> None:
        """Print and log the held-out KL by number of attention blocks."""
        shown = "  ".join(f"k={count} {value:.4f}" for count, value in by_count.items())
        self.say(f"{position.stage} {position.step}: held-out KL by attention blocks  {shown}")
        self._write({"stage": position.stage, "step": position.step, "held_out_kl": by_count})

    def _write(self, row: dict[str, Any]) -> None:
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
