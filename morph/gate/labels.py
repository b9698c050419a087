"""What each block's ssm costs a request, from a few measured layouts of many requests.

Requests differ most in scale, blocks interact, and a request has few measurements. So its loss is modelled as

    loss(r, layout) = s_r · (Σ_l (a_l + d_rl) x_l + Σ_{l<m} p_lm x_l x_m),    x_l = 1 where block l runs its ssm:

a scale per request, sensitivities `a` and interactions `p` that all requests share (ridge regression on losses divided
by the scale), and deviations d_r ~ N(0, Sigma), shrunk by EM. The marginal loss of a block, in a context of other
choices, follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TILE = 8192
"""Rows whose pair products are held at a time."""

PAIR_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Candidate penalties of interactions, as a share of the number of rows; the one that predicts other requests best."""


@dataclass
class LossModel:
    """The fitted model, all float64 on the CPU.

    Attributes:
        sensitivity: a, `[blocks]`. interaction: p, symmetric with zero diagonal, `[blocks, blocks]`.
        scale: s, `[requests]`. deviation: d, `[requests, blocks]`.
        noise: standard deviation of what the model misses, relative to a request's scale.
        pair_ridge: chosen share of `PAIR_RIDGES`.
    """

    sensitivity: torch.Tensor
    interaction: torch.Tensor
    scale: torch.Tensor
    deviation: torch.Tensor
    noise: float
    pair_ridge: float

    def shared(self, layouts: torch.Tensor) -> torch.Tensor:
        """Loss of bool layouts `[rows, blocks]` for a request of scale 1 without deviation, `[rows]`."""
        return _shared(self.sensitivity, self.interaction, (~layouts).double())

    def loss(self, layouts: torch.Tensor) -> torch.Tensor:
        """Loss of each request under its own layout: bool `[requests, blocks]` to `[requests]`."""
        own = (self.deviation * (~layouts)).sum(1)
        return self.scale * (self.shared(layouts) + own)

    def shape(self, ssm_share: torch.Tensor) -> torch.Tensor:
        """Marginal loss per block for a request of scale 1 where the other blocks run ssm with these chances."""
        return self.sensitivity + self.interaction @ ssm_share

    def chain_shape(self, ranking: Sequence[int]) -> torch.Tensor:
        """Marginal loss per block for a request of scale 1, each where the block is on the margin.

        That is in the static chain of `ranking`, just before the block gets attention. Made to fall along the ranking,
        so that thresholds give the chain's layouts.
        """
        ssm = torch.ones(len(self.sensitivity), dtype=torch.float64)
        steps: list[list[float]] = []
        for block in ranking:
            steps.append([float(self.shape(ssm)[block]), 1.0])
            ssm[block] = 0.0
            while len(steps) > 1 and steps[-2][0] < steps[-1][0]:  # pool adjacent violators
                (first, size), (second, more) = steps[-2:]
                steps[-2:] = [[(first * size + second * more) / (size + more), size + more]]
        falling = [value for value, size in steps for _ in range(int(size))]
        shape = torch.empty(len(ranking), dtype=torch.float64)
        # Pooled blocks keep their order by less than what matters to any loss.
        gap = 1e-4 * max(abs(value) for value in falling) / len(ranking)
        shape[list(ranking)] = torch.tensor(falling, dtype=torch.float64) - gap * torch.arange(len(ranking))
        return shape

    def ranking(self) -> list[int]:
        """Blocks from the most to the least sensitive, half of the others running ssm."""
        share = torch.full((len(self.sensitivity),), 0.5, dtype=torch.float64)
        order: list[int] = self.shape(share).argsort(descending=True).tolist()
        return order

    def greedy_ranking(self) -> list[int]:
        """Blocks in the order in which giving them attention lowers the modelled loss most, from all-ssm on."""
        blocks = len(self.sensitivity)
        ssm, order = torch.ones(blocks, dtype=torch.float64), list[int]()
        for _ in range(blocks):
            gain = torch.where(ssm > 0, self.shape(ssm), -torch.inf)
            order.append(int(gain.argmax()))
            ssm[order[-1]] = 0.0
        return order


def _shared(sensitivity: torch.Tensor, interaction: torch.Tensor, ssm: torch.Tensor) -> torch.Tensor:
    return ssm @ sensitivity + 0.5 * ((ssm @ interaction) * ssm).sum(1)


@dataclass
class _Pairs:
    """Indices of block pairs, and the design matrix's products."""

    left: torch.Tensor
    right: torch.Tensor

    def gram(self, ssm: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(ssm.shape[1] + len(self.left), ssm.shape[1] + len(self.left), dtype=torch.float64)
        for rows, share in zip(ssm.split(TILE), weight.split(TILE), strict=True):
            design = torch.cat([rows, rows[:, self.left] * rows[:, self.right]], dim=1)
            total += design.T @ (share[:, None] * design)
        return total

    def cross(self, ssm: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        products = ssm.T @ (target[:, None] * ssm)
        return torch.cat([ssm.T @ target, products[self.left, self.right]])

    def unpack(self, solution: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        interaction = torch.zeros(blocks, blocks, dtype=torch.float64)
        interaction[self.left, self.right] = solution[blocks:]
        return solution[:blocks], interaction + interaction.T


def request_scales(
    loss: torch.Tensor, request: torch.Tensor, count: int, expected: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """s_r: the request's weighted summed loss over what its layouts cost a request of scale 1, float64 `[count]`.

    Drawn to 1 as by half a row more, so that a request whose few layouts hardly cost anything gets no wild scale.

    Args:
        loss: `[rows]`. request: index per row. expected: `[rows]`, the shared part in the row's layout.
    """
    zeros = torch.zeros(count, dtype=torch.float64)
    expected = expected.clamp_min(1e-6)
    prior = 0.5 * (weight * expected).mean()
    totals = zeros.index_add(0, request, weight * loss) + prior
    return totals / (zeros.index_add(0, request, weight * expected) + prior)


def fit_losses(
    loss: torch.Tensor,
    layouts: torch.Tensor,
    request: torch.Tensor,
    count: int,
    weight: torch.Tensor | None = None,
) -> LossModel:
    """Fit the model to measured rows.

    Args:
        loss: float32 `[rows]`. layouts: bool `[rows, blocks]`, True = attention. request: index `[rows]`, 0…count-1.
        weight: `[rows]`, how much a row counts; e.g. more for layouts like those that the gates choose.
    """
    ssm, loss = (~layouts).double(), loss.double()
    weight = torch.ones(len(loss), dtype=torch.float64) if weight is None else weight.double()
    left, right = torch.triu_indices(ssm.shape[1], ssm.shape[1], 1)
    pairs = _Pairs(left, right)
    ridge = _choose_ridge(pairs, ssm, loss, request, count, weight)
    sensitivity, interaction, scale = _fit_shared(pairs, ssm, loss, request, count, weight, ridge)
    residual = loss / scale[request] - _shared(sensitivity, interaction, ssm)
    deviation, noise = _deviations(residual, ssm, request, count, weight)
    centre = (scale[:, None] * deviation).sum(0) / scale.sum()
    return LossModel(sensitivity + centre, interaction, scale, deviation - centre, noise, ridge)


def _fit_shared(
    pairs: _Pairs,
    ssm: torch.Tensor,
    loss: torch.Tensor,
    request: torch.Tensor,
    count: int,
    weight: torch.Tensor,
    ridge: float,
    gram: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, p and s, in turns: scales and shape depend on each other; this settles at once."""
    blocks = ssm.shape[1]
    gram = pairs.gram(ssm, weight) if gram is None else gram
    penalty = torch.full((len(gram),), ridge * float(weight.sum()), dtype=torch.float64)
    penalty[:blocks] *= 0.01
    factor = torch.linalg.cholesky(gram + torch.diag(penalty + 1e-9 * gram.diagonal().mean()))
    scale = torch.ones(count, dtype=torch.float64)
    for _ in range(5):
        cross = pairs.cross(ssm, weight * loss / scale[request])
        sensitivity, interaction = pairs.unpack(torch.cholesky_solve(cross[:, None], factor)[:, 0], blocks)
        scale = request_scales(loss, request, count, _shared(sensitivity, interaction, ssm), weight)
    # Units: a request of scale 1 is the average one.
    unit = scale.mean()
    return sensitivity * unit, interaction * unit, scale / unit


def _choose_ridge(
    pairs: _Pairs, ssm: torch.Tensor, loss: torch.Tensor, request: torch.Tensor, count: int, weight: torch.Tensor
) -> float:
    """The penalty whose interactions, fitted on half of the requests, predict the other half best."""
    if count < 4:
        return PAIR_RIDGES[-1]
    side = torch.randperm(count, generator=torch.Generator().manual_seed(0)) % 2 == 0
    errors = [0.0] * len(PAIR_RIDGES)
    for half in (side, ~side):
        here, there = half[request], ~half[request]
        gram = pairs.gram(ssm[here], weight[here])
        for number, ridge in enumerate(PAIR_RIDGES):
            a, p, _ = _fit_shared(pairs, ssm[here], loss[here], request[here], count, weight[here], ridge, gram)
            expected = _shared(a, p, ssm[there])
            scale = request_scales(loss[there], request[there], count, expected, weight[there])[request[there]]
            errors[number] += float((weight[there] * (loss[there] / scale - expected).square()).sum())
    return PAIR_RIDGES[min(range(len(errors)), key=errors.__getitem__)]


def _deviations(
    residual: torch.Tensor,
    ssm: torch.Tensor,
    request: torch.Tensor,
    count: int,
    weight: torch.Tensor,
    iterations: int = 30,
) -> tuple[torch.Tensor, float]:
    """Posterior means of d_r under a normal prior of mean 0, its covariance and the noise fitted by EM."""
    blocks = ssm.shape[1]
    eye = torch.eye(blocks, dtype=torch.float64)
    grams = torch.zeros(count, blocks, blocks, dtype=torch.float64)
    for rows, owner, share in zip(ssm.split(TILE), request.split(TILE), weight.split(TILE), strict=True):
        grams.index_add_(0, owner, share[:, None, None] * rows[:, :, None] * rows[:, None, :])
    crosses = torch.zeros(count, blocks, dtype=torch.float64).index_add_(0, request, (weight * residual)[:, None] * ssm)
    squares, total = float((weight * residual.square()).sum()), float(weight.sum())
    noise = max(squares / total, 1e-12)
    covariance = eye * max(noise / blocks, 1e-10)
    posterior = torch.zeros(count, blocks, dtype=torch.float64)
    for _ in range(iterations):
        spread = torch.linalg.inv(grams / noise + torch.linalg.inv(covariance))
        posterior = (spread @ (crosses / noise)[..., None]).squeeze(-1)
        covariance = (posterior.T @ posterior + spread.sum(0)) / count + 1e-10 * eye
        moments = posterior[:, :, None] * posterior[:, None, :] + spread
        fitted = 2 * float((posterior * crosses).sum()) - float((grams * moments).sum())
        noise = max((squares - fitted) / total, 1e-12)
    return posterior, float(noise**0.5)
