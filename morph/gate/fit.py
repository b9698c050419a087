"""Regresses gates on utilities: one small network per block, all blocks trained side by side.

Features are standardised and projected on their leading principal directions (thousands of requests do not support a
thousand free directions); both are linear, so they are folded into the first layer and serving sees a plain gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from morph.model.gate import GATE_WIDTH


@dataclass(frozen=True)
class FitConfig:
    """How gates are trained.

    Attributes:
        rank: principal directions kept. width: hidden units. steps: most optimiser steps. batch: rows of a step.
        huber: errors beyond this many standard deviations of a block's utilities count linearly.
        weight_decay, dropout, learning_rate: of AdamW and on the projected features.
        patience: evaluations without a better held-out error before it stops; one every `every` steps.
    """

    rank: int = 128
    width: int = GATE_WIDTH
    steps: int = 2000
    batch: int = 1024
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.2
    huber: float = 3.0
    every: int = 50
    patience: int = 8
    seed: int = 0


@dataclass
class GateStack:
    """The gates of all adaptive blocks, stacked. `fc1` `[blocks, width, inputs]`, `bias1` `[blocks, width]`,
    `fc2` `[blocks, width]`, `bias2` `[blocks]`."""

    fc1: torch.Tensor
    bias1: torch.Tensor
    fc2: torch.Tensor
    bias2: torch.Tensor

    def __call__(self, block: int, features: torch.Tensor) -> torch.Tensor:
        """û of one block: float32 `[rows, inputs]` to `[rows]`."""
        return F.gelu(features @ self.fc1[block].T + self.bias1[block]) @ self.fc2[block] + self.bias2[block]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Named as in gate.safetensors, float32."""
        out = {}
        for block in range(len(self.fc1)):
            name = f"blocks.{block}.gate."
            out[f"{name}fc1.weight"] = self.fc1[block].float().cpu().contiguous()
            out[f"{name}fc1.bias"] = self.bias1[block].float().cpu().contiguous()
            out[f"{name}fc2.weight"] = self.fc2[block][None].float().cpu().contiguous()
            out[f"{name}fc2.bias"] = self.bias2[block][None].float().cpu().contiguous()
        return out

    def to(self, device: torch.device | str) -> GateStack:
        """Copy on another device."""
        return GateStack(*(t.to(device) for t in (self.fc1, self.bias1, self.fc2, self.bias2)))


@dataclass
class Projection:
    """Standardisation and principal directions per block: z = ((f - mean) / deviation) @ basis."""

    mean: torch.Tensor
    deviation: torch.Tensor
    basis: torch.Tensor

    def __call__(self, block: int, features: torch.Tensor) -> torch.Tensor:
        """Features float32 `[rows, inputs]` of one block to `[rows, rank]`."""
        return ((features - self.mean[block]) / self.deviation[block]) @ self.basis[block]

    def leading(self, rank: int) -> Projection:
        """The same with fewer directions."""
        return Projection(self.mean, self.deviation, self.basis[..., :rank])

    def fold(self, fc1: torch.Tensor, bias1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First layer on raw features from one on projected features `[blocks, width, rank]`."""
        raw = torch.einsum("bwr,bir->bwi", fc1, self.basis) / self.deviation[:, None]
        return raw, bias1 - torch.einsum("bwi,bi->bw", raw, self.mean)


FeatureReader = Callable[[int, torch.Tensor], torch.Tensor]
"""Block and row indices to features float32 `[rows, inputs]`."""


@torch.no_grad()
def make_projection(read: FeatureReader, rows: torch.Tensor, blocks: int, rank: int) -> Projection:
    """Principal directions of the standardised features over `rows`, scaled to unit variance up to a floor.

    The log length (the last input) has a direction of its own, the first.
    """
    means, deviations, bases = [], [], []
    for block in range(blocks):
        features = read(block, rows)
        mean, deviation = features.mean(0), features.std(0).clamp_min(1e-3)
        z = (features - mean) / deviation
        body = z[:, :-1]
        kept = min(rank - 1, body.shape[1])
        values, vectors = torch.linalg.eigh(body.T @ body / len(body))
        values, vectors = values.flip(0)[:kept].clamp_min(0), vectors.flip(1)[:, :kept]  # largest first
        # Whitened, but directions of little variance stay small: they are mostly noise.
        scaled = vectors / (values + values[0] * 0.01).sqrt()
        basis = torch.zeros(z.shape[1], kept + 1, device=z.device)
        basis[-1, 0], basis[:-1, 1:] = 1.0, scaled
        means.append(mean)
        deviations.append(deviation)
        bases.append(basis)
    return Projection(*(torch.stack(parts).float() for parts in (means, deviations, bases)))


def fit_gates(
    read: FeatureReader,
    targets: torch.Tensor,
    train: torch.Tensor,
    held: torch.Tensor,
    config: FitConfig | None = None,
    projection: Projection | None = None,
) -> tuple[GateStack, list[float]]:
    """Train one gate per block.

    Args:
        read: features of a block. targets: float32 `[rows, blocks]`, utilities.
        train, held: row indices; rows of one request must be on one side. Training stops early on `held`.
        projection: of at least `config.rank` directions, made on `train` if None.

    Returns:
        Gates on raw features, and per block the share of held-out variance that they explain.
    """
    config = config or FitConfig()
    device, blocks = targets.device, targets.shape[1]
    generator = torch.Generator(device=device).manual_seed(config.seed)
    projection = (projection or make_projection(read, train, blocks, config.rank)).leading(config.rank)
    z = torch.stack([projection(block, read(block, train)) for block in range(blocks)])
    z_held = torch.stack([projection(block, read(block, held)) for block in range(blocks)])
    centre, unit = targets[train].mean(0), targets[train].std(0).clamp_min(1e-6)
    y, y_held = ((targets[rows] - centre) / unit for rows in (train, held))
    rank = z.shape[-1]

    def init(*shape: int, fan: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device=device) / math.sqrt(fan)).requires_grad_()

    fc1, fc2 = init(blocks, config.width, rank, fan=rank), init(blocks, config.width, fan=config.width)
    bias1 = torch.zeros(blocks, config.width, device=device, requires_grad=True)
    bias2 = torch.zeros(blocks, device=device, requires_grad=True)
    optimiser = torch.optim.AdamW(
        [
            {"params": [fc1, fc2], "weight_decay": config.weight_decay},
            {"params": [bias1, bias2], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, 0.98),
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, config.steps)

    def predict(x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(torch.einsum("bnr,bwr->bnw", x, fc1) + bias1[:, None])
        return (torch.einsum("bnw,bw->bn", hidden, fc2) + bias2[:, None]).T

    best, best_error, waited = None, torch.full((blocks,), math.inf, device=device), 0
    for step in range(config.steps):
        rows = torch.randint(len(train), (min(config.batch, len(train)),), generator=generator, device=device)
        x = z[:, rows]
        if config.dropout:
            kept = torch.rand(x.shape, generator=generator, device=device) >= config.dropout
            x = x * kept / (1 - config.dropout)
        loss = F.huber_loss(predict(x), y[rows], delta=config.huber, reduction="none").mean(0).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % config.every == config.every - 1:
            with torch.no_grad():
                error = F.huber_loss(predict(z_held), y_held, delta=config.huber, reduction="none").mean(0)
                better = error < best_error
                now = [t.detach().clone() for t in (fc1, bias1, fc2, bias2)]
                if best is None:
                    best = now
                for kept, new in zip(best, now, strict=True):
                    kept[better] = new[better]
                best_error = torch.where(better, error, best_error)
                waited = 0 if bool(better.any()) else waited + 1
            if waited >= config.patience:
                break
    assert best is not None, f"FitConfig.steps is {config.steps}, want at least `every` = {config.every}"
    with torch.no_grad():
        fc1, bias1, fc2, bias2 = best
        residual = (predict(z_held) - y_held).square().mean(0)
        r2 = (1 - residual / y_held.var(0, correction=0).clamp_min(1e-9)).tolist()
        raw, raw_bias = projection.fold(fc1, bias1)
        gates = GateStack(raw, raw_bias, fc2 * unit[:, None], bias2 * unit + centre)
    return gates, r2
