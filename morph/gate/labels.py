"""Per-request utilities from a few measured layouts: what each block's ssm costs this request.

A request has few layouts and many blocks, so its utilities are shrunk to what requests have in common. Requests differ
most in scale (training.md: how many blocks matters more than which), so the shape is learned on losses divided by
the request's own mean: u_r = s_r · v_r, v_r ~ N(mu, Sigma), loss = s_r (v_r · ssm + noise), fitted by EM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Utilities:
    """Result of `fit_utilities`.

    Attributes:
        utility: float32 `[requests, blocks]`, posterior mean of u, nats per answer token.
        scale: float32 `[requests]`, s_r. shape: float64 `[blocks]`, mu. covariance: float64 `[blocks, blocks]`, Sigma.
        noise: standard deviation of what the additive model misses, relative to the request's scale.
    """

    utility: torch.Tensor
    scale: torch.Tensor
    shape: torch.Tensor
    covariance: torch.Tensor
    noise: float


def request_scales(loss: torch.Tensor, request: torch.Tensor, count: int, expected: torch.Tensor) -> torch.Tensor:
    """s_r: the request's summed loss over what its layouts cost the average request.

    Args:
        loss: `[rows]`. request: index per row. expected: `[rows]`, the average request's loss in the row's layout.
    """
    totals = torch.zeros(count, dtype=torch.float64).index_add_(0, request, loss.double())
    typical = torch.zeros(count, dtype=torch.float64).index_add_(0, request, expected.double())
    return totals.clamp_min(1e-6) / typical.clamp_min(1e-6)


def fit_utilities(
    loss: torch.Tensor,
    layouts: torch.Tensor,
    request: torch.Tensor,
    count: int,
    weight: torch.Tensor | None = None,
    iterations: int = 30,
) -> Utilities:
    """Shrunk utilities of every request.

    Args:
        loss: float32 `[rows]`. layouts: bool `[rows, blocks]`, True = attention. request: index `[rows]`, 0…count-1.
        weight: `[rows]`, how much a row counts; e.g. more for layouts like those that the gates choose.
    """
    ssm, loss = (~layouts).double(), loss.double()
    blocks = ssm.shape[1]
    weight = torch.ones(len(loss), dtype=torch.float64) if weight is None else weight.double()
    eye = torch.eye(blocks, dtype=torch.float64)
    gram = ssm.T @ (weight[:, None] * ssm)
    ridge = 1e-3 * gram.diagonal().mean() * eye
    shape = torch.linalg.solve(gram + ridge, ssm.T @ (weight * loss))
    scale = torch.ones(count, dtype=torch.float64)
    for _ in range(3):  # scales and shape depend on each other; this settles at once
        scale = request_scales(loss, request, count, (ssm @ shape).clamp_min(1e-6))
        relative = loss / scale[request]
        shape = torch.linalg.solve(gram + ridge, ssm.T @ (weight * relative))
    relative = loss / scale[request]
    # Sufficient statistics of each request's own regression.
    grams = torch.zeros(count, blocks, blocks, dtype=torch.float64)
    grams.index_add_(0, request, weight[:, None, None] * ssm[:, :, None] * ssm[:, None, :])
    crosses = torch.zeros(count, blocks, dtype=torch.float64).index_add_(0, request, (weight * relative)[:, None] * ssm)
    squares = float((weight * relative.square()).sum())
    noise = max(float((weight * (relative - ssm @ shape).square()).sum() / weight.sum()), 1e-12)
    covariance = eye * (shape.square().mean() + 1e-6)
    posterior = shape.expand(count, -1)
    for _ in range(iterations):
        prior = torch.linalg.inv(covariance)
        spread = torch.linalg.inv(grams / noise + prior)
        posterior = (spread @ (crosses / noise + prior @ shape)[..., None]).squeeze(-1)
        shape = posterior.mean(0)
        centred = posterior - shape
        covariance = (centred.T @ centred + spread.sum(0)) / count + 1e-8 * eye
        moments = posterior[:, :, None] * posterior[:, None, :] + spread
        residual = squares - 2 * float((posterior * crosses).sum()) + float((grams * moments).sum())
        noise = max(residual / float(weight.sum()), 1e-12)
    utility = (posterior * scale[:, None]).float()
    return Utilities(utility, scale.float(), shape, covariance, noise**0.5)


def ranking_of(utilities: torch.Tensor) -> list[int]:
    """Blocks from the most to the least sensitive, by mean utility `[requests, blocks]`."""
    order: list[int] = utilities.mean(0).argsort(descending=True).tolist()
    return order


def nested_layouts(ranking: list[int], counts: list[int]) -> torch.Tensor:
    """Static layouts with attention in the first `count` blocks of the ranking; bool `[counts, blocks]`."""
    layouts = torch.zeros(len(counts), len(ranking), dtype=torch.bool)
    for row, count in enumerate(counts):
        layouts[row, ranking[:count]] = True
    return layouts


def random_layouts(
    ranking: list[int] | None, rows: int, generator: torch.Generator, spread: float = 0.35
) -> torch.Tensor:
    """Layouts of uniform count, bool `[rows, blocks]`: half at random places, half near the ranking's.

    Args:
        ranking: most sensitive first; None puts all at random places.
        spread: noise on the ranking, as a share of its length.
    """
    blocks = len(ranking) if ranking is not None else 0
    if ranking is None:
        raise ValueError("random_layouts needs a ranking; pass list(range(blocks)) for none in particular")
    place = torch.empty(blocks)
    place[torch.tensor(ranking)] = torch.arange(blocks, dtype=torch.float32)
    counts = torch.randint(1, blocks, (rows,), generator=generator)
    noise = torch.randn(rows, blocks, generator=generator) * blocks * spread
    key = torch.where(
        (torch.arange(rows) % 2 == 0)[:, None], torch.rand(rows, blocks, generator=generator), place + noise
    )
    rank = key.argsort(dim=1).argsort(dim=1)
    return rank < counts[:, None]
