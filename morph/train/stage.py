"""One stage of training, from any of its steps to its end or to a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from morph.errors import MorphError
from morph.train.config import DistillConfig, RunConfig, StageConfig
from morph.train.evaluate import evaluate_layouts, rank_blocks
from morph.train.graphs import CapturedStep
from morph.train.layouts import free_blocks, step_layouts
from morph.train.optimizer import MixerOptimizer
from morph.train.parallel import Group
from morph.train.progress import Progress
from morph.train.snapshot import Position, save_snapshot, snapshots
from morph.train.steps import align, distill
from morph.train.stream import Batch, Mixture
from morph.train.trunk import Trunk

PROBE_LENGTH = 1024
"""Longest sequences that blocks are ranked and layouts evaluated on."""


@dataclass
class StageRunner:
    """Everything that a stage needs; `position` moves with it.

    Attributes:
        mixture: sequences, in an order that `position.drawn` determines.
        folder: of the checkpoints.
        deadline: `time.monotonic()` at which to stop; None = never.
        evaluations: held-out KL by number of attention blocks, of the last evaluation.
    """

    trunk: Trunk
    parameters: dict[str, nn.Parameter]
    mixture: Mixture
    run: RunConfig
    config: StageConfig
    position: Position
    group: Group
    folder: Path
    progress: Progress
    deadline: float | None = None

    def __post_init__(self) -> None:
        self.optimizer = MixerOptimizer(self.parameters, self.config)
        self.evaluations: dict[str, float] = {}
        self._captured: dict[tuple[torch.Size, float], CapturedStep] = {}
        self._saved_at = time.monotonic()
        self._saved_step = self.position.step

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Parameters, optimiser and data of a checkpoint inside the stage."""
        self.optimizer.restore(tensors, self.position.updates)
        self.mixture.restore(self.position.drawn)

    def train(self) -> bool:
        """Run to the end of the stage (True) or to the deadline (False, with a checkpoint).

        Raises:
            MorphError: the loss is no longer a number; the last good checkpoint is kept.
        """
        config, position = self.config, self.position
        if not position.drawn:
            for step in range(position.step):
                self.mixture.skip(config.rows(step), config.length(step))
        step_seconds = 0.0
        while position.step < config.steps:
            begin = time.monotonic()
            late = self.deadline is not None and begin + step_seconds > self.deadline
            if self.group.agree(late):
                self.save()
                return False
            self._prepare_step()
            losses, norm = self._step()
            position.step += 1
            position.updates += 1
            rows, length = config.rows(position.step - 1), config.length(position.step - 1)
            position.tokens += rows * length * config.passes
            self.progress.add(losses, norm, rows * length * config.passes)
            last = position.step == config.steps
            if last or position.step % self.run.log_every == 0:
                self._log()
                step_seconds = self.progress.step_seconds
            if self.group.agree(time.monotonic() - self._saved_at > self.run.checkpoint_seconds) and not last:
                self.save()
        self._evaluate()
        return True

    # ---- one step

    def _prepare_step(self) -> None:
        """Rank the blocks and evaluate where it is time to."""
        if not isinstance(self.config, DistillConfig):
            return
        step, steps = self.position.step, self.config.steps
        every = max(1, round(self.config.ranking_every * steps)) if self.config.ranking_every else steps
        if not self.position.ranking or step % every == 0:
            tokens = self._probe()
            ranking = rank_blocks(self.trunk, tokens, self._rows(tokens.shape[1]), self.config.kl_chunk)
            # One process decides: rounding may differ between devices.
            own = torch.tensor(ranking, device=self.group.device, dtype=torch.float32) * float(self.group.is_first)
            self.position.ranking = [round(block) for block in self.group.add(own).tolist()]
        every = round(self.config.evaluate_every * steps)
        if every and step and step % every == 0 and step != self.position.begin:
            self._evaluate()

    def _step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of this process's rows, their sum over processes, and the update."""
        config, step = self.config, self.position.step
        rows, length = config.rows(step), config.length(step)
        begin, end = self.group.share(rows)
        batch = self.mixture.batch(rows, length, begin, end)
        self.position.drawn = self.mixture.state()
        self.optimizer.zero()
        losses = torch.zeros(1, device=self.group.device)
        for first in range(0, end - begin, self._rows(length)):
            part = slice(first, first + self._rows(length))
            loss = self._losses(Batch(batch.tokens[part], batch.answer[part]), rows, step)
            losses = losses + loss
        self.group.add(self.optimizer.gradient)
        norm = self.optimizer.step(self.optimizer.learning_rate(step, self.position.begin))
        return losses, norm

    def _rows(self, length: int) -> int:
        """Sequences at once on one device."""
        return max(1, self.config.micro_tokens // (length * self.config.passes))

    def _losses(self, batch: Batch, rows: int, step: int) -> torch.Tensor:
        """Losses of some rows, times their share of the step's."""
        tokens = self._on_device(batch.tokens)
        share = len(tokens) / rows
        if not isinstance(self.config, DistillConfig):
            errors = self._align(tokens, share)
            trained = sum(mixer is not None for mixer in self.trunk.mixers)
            return errors.sum()[None] * (share / trained)
        config = self.config
        # Layouts depend on the seed and the step alone, so that a resumed run draws the same ones.
        rng = np.random.default_rng([self.run.seed, 2, step])
        layouts = step_layouts(self.trunk.layout_config, config.layouts, self.position.ranking, rng)
        weights = None
        if config.answer_weight != 1:
            raw = 1 + (config.answer_weight - 1) * self._on_device(batch.answer).float()
            weights = raw / raw.mean(1, keepdim=True)
        result = distill(
            self.trunk, tokens, weights, layouts, share, config.kl_chunk, self._hidden_weight(config, step),
            config.hidden_every,
        )  # fmt: skip
        return torch.cat([result.kl, result.hidden[None]]) * share

    def _align(self, tokens: torch.Tensor, share: float) -> torch.Tensor:
        """Errors per block, by a captured step where that is wanted and the rows have its shape."""
        if self.trunk.compiled and tokens.is_cuda and self.run.graphs:
            key = (tokens.shape, share)
            if key not in self._captured:
                held = self.optimizer.gradient.clone()
                self._captured.clear()  # graphs keep their memory
                self._captured[key] = CapturedStep(lambda rows: align(self.trunk, rows, share), tokens)
                self.optimizer.gradient.copy_(held)
            return self._captured[key](tokens)
        return align(self.trunk, tokens, share)

    @staticmethod
    def _hidden_weight(config: DistillConfig, step: int) -> float:
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, step / config.steps)))
        weight = config.hidden_final + (config.hidden_weight - config.hidden_final) * fall
        return weight if weight > 1e-3 else 0.0

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.group.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.group.device, non_blocking=True)

    # ---- now and then

    def _log(self) -> None:
        losses = self.group.add(self.progress.losses())
        rate = self.optimizer.learning_rate(self.position.step - 1, self.position.begin)
        names = ["loss"]
        if isinstance(self.config, DistillConfig):
            kinds = ["ssm", "ranked"][: self.config.layouts] + [f"random{i}" for i in range(1, self.config.layouts - 1)]
            names = [f"kl_{kind}" for kind in kinds] + ["hidden"]
        self.progress.report(self.position, self.config, dict(zip(names, losses.tolist(), strict=True)), rate)
        if not (math.isfinite(float(losses.sum())) and math.isfinite(self.progress.largest_norm())):
            self._stop_at_nan(f"loss {losses.tolist()}, gradient norm {self.progress.largest_norm():.3g}")
        self.progress.reset()

    def _stop_at_nan(self, what: str) -> None:
        kept = snapshots(self.folder)
        raise MorphError(
            f"{self.position.stage} went wrong by step {self.position.step}: {what}. The last good checkpoint, "
            f"{kept[-1].name if kept else 'none yet'}, is kept; lower {self.position.stage}.lr or "
            f"{self.position.stage}.clip in a run that begins with --init"
        )

    def save(self) -> None:
        """Write a checkpoint, unless there is one of this step already; never of weights that are no numbers.

        Raises:
            MorphError: a weight is no number, or the disk is full.
        """
        self._saved_at = time.monotonic()
        state = self.optimizer.state()
        finite = torch.stack([tensor.isfinite().all() for tensor in state.values()]).all()
        if self.group.agree(not bool(finite)):
            self._stop_at_nan("a weight is not a number")
        if self.group.is_first:
            save_snapshot(self.folder, self.position, state, self.run.keep)
        self.group.wait()

    def _probe(self) -> torch.Tensor:
        length = min(PROBE_LENGTH, min(length for _, length in self.config.lengths))
        return self.mixture.probe(max(1, self.run.held_out_rows), length).to(self.group.device)

    def _evaluate(self) -> None:
        if not self.run.held_out_rows or not self.mixture.held_out:
            return
        tokens = self._probe()
        chunk = self.config.kl_chunk if isinstance(self.config, DistillConfig) else 2048
        ranking = self.position.ranking or free_blocks(self.trunk.layout_config)
        with self.averaged():
            self.evaluations = evaluate_layouts(self.trunk, tokens, ranking, self._rows(tokens.shape[1]), chunk)
        self.progress.evaluation(self.position, self.evaluations)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The moving average in place of the parameters."""
        averages = self.optimizer.averages
        if averages is None:
            yield
            return
        values: list[torch.Tensor] = list(self.parameters.values())
        with torch.no_grad():
            kept = [value.detach().clone() for value in values]
            torch._foreach_copy_(values, averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(values, kept)
