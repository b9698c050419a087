"""Is the gate worth it: gated layouts against shuffled ones, the best static ones and an oracle over counts.

All on measured losses (KL to the base per answer token), with bootstrap intervals over requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch

from morph.gate.labels import LossModel

Array = npt.NDArray[np.float64]

BUCKETS = (0, 128, 256, 512, 1024, 2048, 1 << 30)
"""Prompt lengths between which masks are exchanged in the shuffled control: within a bucket costs are alike."""


@dataclass(frozen=True)
class Ratio:
    """A ratio of mean losses with its 95 % bootstrap interval over requests."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """Rounded for a report."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def bootstrap_ratio(
    numerator: Callable[[npt.NDArray[np.int64]], float],
    denominator: Callable[[npt.NDArray[np.int64]], float],
    count: int,
    draws: int = 1000,
    seed: int = 0,
) -> Ratio:
    """Ratio of two statistics of a sample of requests, given their indices (with repeats)."""
    rng = np.random.default_rng(seed)
    everyone = np.arange(count)
    values = []
    for _ in range(draws):
        rows = rng.integers(0, count, count)
        values.append(numerator(rows) / max(denominator(rows), 1e-12))
    low, high = np.quantile(values, [0.025, 0.975])
    return Ratio(numerator(everyone) / max(denominator(everyone), 1e-12), float(low), float(high))


def mean_of(values: Array) -> Callable[[npt.NDArray[np.int64]], float]:
    """Statistic: the mean of per-request values."""
    return lambda rows: float(values[rows].mean())


def static_at(chain: Array, spent: Array, gated_spent: Array) -> Callable[[npt.NDArray[np.int64]], float]:
    """Statistic: mean loss of the static chain at what the gated layouts spend on the same requests.

    Between two counts, requests are split between the two layouts at random: linear in between.

    Args:
        chain: `[requests, counts]` losses of nested static layouts. spent: `[requests, counts]` what each spends
            (attention blocks, or seconds), ascending in the mean. gated_spent: `[requests]`.
    """

    def statistic(rows: npt.NDArray[np.int64]) -> float:
        return float(np.interp(gated_spent[rows].mean(), spent[rows].mean(0), chain[rows].mean(0)))

    return statistic


def oracle_at(chain: Array, spent: Array, gated_spent: Array) -> Callable[[npt.NDArray[np.int64]], float]:
    """Statistic: mean loss when each request takes the count of the chain that suits it best, at equal mean spending.

    Found by a Lagrangian sweep, linear in between.
    """
    slopes = np.concatenate([[0.0], np.geomspace(1e-6, 1e2, 400)]) * (np.ptp(chain) / np.ptp(spent))
    choice = (chain[:, :, None] + slopes * spent[:, :, None]).argmin(1)
    loss = np.take_along_axis(chain, choice, 1)
    cost = np.take_along_axis(spent, choice, 1)

    def statistic(rows: npt.NDArray[np.int64]) -> float:
        costs, losses = cost[rows].mean(0), loss[rows].mean(0)
        return float(np.interp(gated_spent[rows].mean(), costs[::-1], losses[::-1]))

    return statistic


def shuffle_within_buckets(layouts: torch.Tensor, lengths: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Layouts `[requests, blocks]` exchanged between requests of similar length; none keeps its own where it can."""
    out = layouts.clone()
    bucket = np.digitize(np.asarray(lengths), BUCKETS)
    rng = np.random.default_rng(seed)
    for label in np.unique(bucket):
        members = rng.permutation(np.flatnonzero(bucket == label))
        out[torch.from_numpy(members)] = layouts[torch.from_numpy(np.roll(members, 1))]
    return out


@dataclass
class Decisions:
    """What predictions are judged by, without running the model: modelled losses of the layouts that they lead to.

    Attributes:
        model: losses of each request under any layout. rankings: static orders; the best of them counts.
        lengths: prompt tokens of each request. adaptive: blocks that have a choice; the others are never counted.
        counts: mean shares of adaptive blocks with attention.
    """

    model: LossModel
    rankings: Sequence[Sequence[int]]
    lengths: Sequence[int]
    adaptive: Sequence[int]
    counts: Sequence[float]

    def static_loss(self, count: int) -> float:
        """Mean loss of the best static layout with attention in `count` adaptive blocks."""
        losses = []
        for ranking in self.rankings:
            chosen = [block for block in ranking if block in self.adaptive][:count]
            layout = torch.zeros(len(ranking), dtype=torch.bool)
            layout[chosen] = True
            losses.append(float(self.model.loss(layout.expand(len(self.lengths), -1)).mean()))
        return min(losses)


def decision_ratios(predicted: torch.Tensor, decisions: Decisions, shuffles: int = 2) -> dict[str, float]:
    """Modelled loss of thresholding predictions against the best static layout, and against shuffled layouts.

    Honest when no prediction comes from a gate that saw its own request. Geometric means over the counts, < 1 is good.

    Args:
        predicted: û `[requests, blocks]`.

    Returns:
        `vs_static` and `vs_shuffled`.
    """
    adaptive = torch.tensor(list(decisions.adaptive))
    values = predicted[:, adaptive]
    static, shuffled = 0.0, 0.0
    # A model of few rows may give losses below zero somewhere: nothing counts as less than a thousandth of all-ssm.
    floor = max(1e-3 * float(decisions.model.loss(torch.zeros(predicted.shape, dtype=torch.bool)).mean()), 1e-12)
    for share in decisions.counts:
        per_request = max(1, round(share * len(adaptive)))
        order = values.flatten().argsort(descending=True)[: per_request * len(values)]
        bits = torch.zeros(values.numel(), dtype=torch.bool)
        bits[order] = True
        layouts = torch.zeros(predicted.shape, dtype=torch.bool)
        layouts[:, adaptive] = bits.view(values.shape)
        loss = float(decisions.model.loss(layouts).mean())
        others = [shuffle_within_buckets(layouts, decisions.lengths, seed) for seed in range(shuffles)]
        mean = sum(float(decisions.model.loss(other).mean()) for other in others) / shuffles
        static += math.log(max(loss, floor) / max(decisions.static_loss(per_request), floor))
        shuffled += math.log(max(loss, floor) / max(mean, floor))
    count = len(decisions.counts)
    return {"vs_static": math.exp(static / count), "vs_shuffled": math.exp(shuffled / count)}
