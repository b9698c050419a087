"""Regresses gates on marginal losses: ridge regression per block, chosen by cross-validation over requests.

Some thousand requests do not support a network on a thousand features: small networks fitted here overfit where a
linear map still predicts requests that it never saw. A linear map is two units of a gate: gelu(x) - gelu(-x) = x.

What is predicted is û_l = s (v_l + α d_l): s the request's scale, v the marginal losses that all requests share, each
taken where its block is on the margin, d the request's own deviations. α < 1 trusts how *much* a request loses more
than *where*; α and the penalty are chosen by the decisions that they lead to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from morph.gate.evaluate import Decisions, decision_ratios
from morph.gate.labels import LossModel
from morph.gate.policy import GateWeights

LENGTH_WEIGHT = 3.0
"""The standardised log length counts this much against one of the many other features."""


@dataclass(frozen=True)
class FitConfig:
    """What is tried.

    Attributes:
        penalties: ridge penalties, as shares of the features' total variance. deviations: values of α.
        cap: targets are clamped to their quantiles `1 - cap` and `cap`, then shifted back to their mean: losses are
            heavy-tailed, and one request in a hundred would have a third of the variance.
        folds: of the cross-validation, over requests.
        counts: shares of attention blocks at which decisions are judged.
    """

    penalties: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03)
    deviations: tuple[float, ...] = (0.0, 0.3, 0.6, 1.0)
    cap: float = 0.98
    folds: int = 5
    counts: tuple[float, ...] = (4 / 30, 8 / 30, 15 / 30)
    seed: int = 0


@dataclass
class GateStack:
    """The gates of all blocks, stacked. `fc1` `[blocks, width, inputs]`, `bias1` `[blocks, width]`,
    `fc2` `[blocks, width]`, `bias2` `[blocks]`; zeros in static blocks."""

    fc1: torch.Tensor
    bias1: torch.Tensor
    fc2: torch.Tensor
    bias2: torch.Tensor

    def __call__(self, block: int, features: torch.Tensor) -> torch.Tensor:
        """û of one block: float32 `[rows, inputs]` to `[rows]`.

        In double precision: large features cancel in û, and a GPU may round single precision to ten bits.
        """
        hidden = features.double() @ self.fc1[block].double().T + self.bias1[block].double()
        return (F.gelu(hidden) @ self.fc2[block].double() + self.bias2[block].double()).float()

    @classmethod
    def linear(cls, weight: torch.Tensor, bias: torch.Tensor) -> GateStack:
        """Gates that are linear in the raw features: `weight` `[blocks, inputs]`, `bias` `[blocks]`."""
        ones = torch.ones_like(bias)
        return cls(
            torch.stack([weight, -weight], dim=1).float(),
            torch.stack([bias, -bias], dim=1).float(),
            torch.stack([ones, -ones], dim=1).float(),
            torch.zeros_like(bias).float(),
        )

    @classmethod
    def of(cls, weights: Sequence[GateWeights | None]) -> GateStack:
        """The gates of a model folder; blocks without one get zeros."""
        width = max(len(w.bias1) for w in weights if w is not None)
        inputs = next(w.fc1.shape[1] for w in weights if w is not None)
        stack = cls(
            torch.zeros(len(weights), width, inputs),
            torch.zeros(len(weights), width),
            torch.zeros(len(weights), width),
            torch.zeros(len(weights)),
        )
        for block, gate in enumerate(weights):
            if gate is not None:
                own = len(gate.bias1)
                stack.fc1[block, :own], stack.bias1[block, :own] = gate.fc1, gate.bias1
                stack.fc2[block, :own], stack.bias2[block] = gate.fc2, gate.bias2
        return stack

    def tensors(self, blocks: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
        """Named as in gate.safetensors, float32; of the given blocks, or of all."""
        out = {}
        for block in range(len(self.fc1)) if blocks is None else blocks:
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
class FeatureRows:
    """What the gates saw in some measured rows.

    Attributes:
        features: float16 `[rows, blocks, 2 * hidden]`, mean and last normed input, on any device.
        request: `[rows]`, index 0…requests-1. log_length: float32 `[requests]`.
        probe: `[requests]`, the row of each request whose prediction stands for it.
    """

    features: torch.Tensor
    request: torch.Tensor
    log_length: torch.Tensor
    probe: torch.Tensor

    def block(self, block: int) -> torch.Tensor:
        """Gate features of a block, float64 `[rows, 2 * hidden + 1]`."""
        lengths = self.log_length[self.request].to(self.features.device)
        return torch.cat([self.features[:, block].double(), lengths.double()[:, None]], dim=1)


@dataclass
class GateFit:
    """Result of `fit_gates`.

    Attributes:
        gates: on the CPU. penalty, deviation: the chosen ones. candidates: all, with their ratios.
        predicted: û of each request by gates that did not see it, float32 `[requests, blocks]`.
        r2: share of the targets' variance that `predicted` explains, per block; nan in static blocks.
    """

    gates: GateStack
    penalty: float
    deviation: float
    candidates: list[dict[str, float]]
    predicted: torch.Tensor
    r2: list[float]


def capped(targets: torch.Tensor, cap: float) -> torch.Tensor:
    """Columns clamped to their quantiles `1 - cap` and `cap`, with the mean that they had: still expected losses."""
    low, high = targets.quantile(1 - cap, dim=0), targets.quantile(cap, dim=0)
    clamped = targets.clamp(low, high)
    return clamped + (targets.mean(0) - clamped.mean(0))


@dataclass
class _BlockFit:
    """Solutions of one block: weights on standardised features `[penalties, inputs, targets]`, and predictions of held
    out requests `[penalties, requests, targets]`."""

    mean: torch.Tensor
    deviation: torch.Tensor
    weights: torch.Tensor
    held_out: torch.Tensor


def _fit_block(
    raw: torch.Tensor, rows: FeatureRows, targets: torch.Tensor, fold: torch.Tensor, config: FitConfig
) -> _BlockFit:
    device = raw.device
    request, probe, fold = rows.request.to(device), rows.probe.to(device), fold.to(device)
    mean, deviation = raw.mean(0), raw.std(0, correction=0).clamp_min(1e-3)
    z = (raw - mean) / deviation
    z[:, -1] *= LENGTH_WEIGHT
    z = torch.cat([z, torch.ones_like(z[:, :1])], dim=1)
    # Every request counts the same, however many of its rows were kept.
    weight = 1.0 / torch.bincount(request, minlength=len(targets)).double()[request]
    wanted = targets.to(device).double()[request]
    grams, crosses = [], []
    for number in range(config.folds):
        here = fold[request] == number
        scaled = z[here] * weight[here, None]
        grams.append(z[here].T @ scaled)
        crosses.append(scaled.T @ wanted[here])
    gram, cross = torch.stack(grams), torch.stack(crosses)
    # All but one fold each, then all of them.
    gram = torch.cat([gram.sum(0) - gram, gram.sum(0, keepdim=True)])
    cross = torch.cat([cross.sum(0) - cross, cross.sum(0, keepdim=True)])
    trace = gram.diagonal(dim1=1, dim2=2)[:, :-1].sum(1)
    solutions = []
    for share in config.penalties:
        penalty = torch.ones(z.shape[1], device=device, dtype=torch.float64)
        penalty[-1] = 1e-9  # the intercept is free
        ridged = gram + torch.diag_embed((share * trace)[:, None] * penalty)
        solutions.append(torch.cholesky_solve(cross, torch.linalg.cholesky(ridged)))
    weights = torch.stack(solutions)
    probes = z[probe]
    held_out = torch.einsum("ri,prit->prt", probes, weights[:, fold])
    final = weights[:, -1].clone()
    final[:, -2] *= LENGTH_WEIGHT
    return _BlockFit(mean, deviation, final.cpu(), held_out.cpu())


def fit_gates(
    rows: FeatureRows,
    model: LossModel,
    ranking: Sequence[int],
    rankings: Sequence[Sequence[int]],
    lengths: Sequence[int],
    adaptive: Sequence[int],
    config: FitConfig | None = None,
) -> GateFit:
    """Gates for the adaptive blocks.

    Args:
        rows: features; every request of `model` has some. ranking: the static order that says where each block is on
            the margin. rankings: static orders that decisions are compared with.
        lengths: prompt tokens of each request. adaptive: blocks that have a gate.
    """
    config = config or FitConfig()
    count, blocks = len(rows.probe), rows.features.shape[1]
    own = capped(model.scale[:, None] * model.deviation, config.cap)
    scale = capped(model.scale[:, None], config.cap)
    shape = model.chain_shape(ranking)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(config.seed))
    fold = torch.empty(count, dtype=torch.long)
    fold[order] = torch.arange(count) % config.folds
    inputs = rows.features.shape[2] + 1
    weights = torch.zeros(len(config.penalties), blocks, inputs + 1, 2, dtype=torch.float64)
    held_out = torch.zeros(len(config.penalties), count, blocks, 2, dtype=torch.float64)
    means = torch.zeros(blocks, inputs, dtype=torch.float64)
    deviations = torch.ones(blocks, inputs, dtype=torch.float64)
    for block in adaptive:
        targets = torch.cat([own[:, block : block + 1], scale], dim=1)
        fitted = _fit_block(rows.block(block), rows, targets, fold, config)
        weights[:, block], held_out[:, :, block] = fitted.weights, fitted.held_out
        means[block], deviations[block] = fitted.mean.cpu(), fitted.deviation.cpu()

    decisions = Decisions(model, rankings, lengths, adaptive, config.counts)
    candidates, best = [], (math.inf, 0, 0.0)
    for number, penalty in enumerate(config.penalties):
        for alpha in config.deviations:
            predicted = _mixed(held_out[number], shape, alpha)
            ratios = decision_ratios(predicted, decisions)
            candidates.append({"penalty": penalty, "deviation": alpha, **ratios})
            # To beat the best static layout, and to fit the request that it is for: both, as a geometric mean.
            score = math.sqrt(ratios["vs_static"] * ratios["vs_shuffled"])
            if score < best[0]:
                best = (score, number, alpha)
    _, number, alpha = best
    predicted = _mixed(held_out[number], shape, alpha)
    target = shape * scale + alpha * own
    r2 = 1 - (predicted - target).square().mean(0) / target.var(0, correction=0).clamp_min(1e-18)
    static = [block not in adaptive for block in range(blocks)]
    r2[torch.tensor(static)] = math.nan
    mixed = _mixed(weights[number], shape[:, None], alpha)
    raw = mixed[:, :-1] / deviations
    bias = mixed[:, -1] - (raw * means).sum(1)
    return GateFit(
        GateStack.linear(raw, bias), config.penalties[number], alpha, candidates, predicted.float(), r2.tolist()
    )


def _mixed(parts: torch.Tensor, shape: torch.Tensor, alpha: float) -> torch.Tensor:
    """s v + α (s d) of the two last entries, s d and s."""
    return alpha * parts[..., 0] + shape * parts[..., 1]


@torch.no_grad()
def principal_features(rows: FeatureRows, rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Features on their leading principal directions, for keeping: float16 `[rows, blocks, rank]`, and the projection.

    The log length comes first; z = ((f - mean) / deviation) @ basis.
    """
    kept, parts = [], list[tuple[torch.Tensor, ...]]()
    for block in range(rows.features.shape[1]):
        raw = rows.block(block)
        mean, deviation = raw.mean(0), raw.std(0, correction=0).clamp_min(1e-3)
        z = (raw - mean) / deviation
        wanted = min(rank - 1, z.shape[1] - 1)
        # Single precision: directions, not results, and several times faster on a GPU.
        gram = (z[:, :-1].T @ z[:, :-1]).float()
        vectors = torch.linalg.eigh(gram)[1].flip(1)[:, :wanted].to(z.dtype)
        basis = torch.zeros(z.shape[1], wanted + 1, device=z.device, dtype=z.dtype)
        basis[-1, 0], basis[:-1, 1:] = 1.0, vectors
        kept.append((z @ basis).half().cpu())
        parts.append((mean.float().cpu(), deviation.float().cpu(), basis.half().cpu()))
    names = ("mean", "deviation", "basis")
    return torch.stack(kept, dim=1), {name: torch.stack([part[i] for part in parts]) for i, name in enumerate(names)}
