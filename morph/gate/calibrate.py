"""From a budget to the τ that spends it, over calibration traffic, with the gates deciding for themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from morph.errors import InvalidRequest
from morph.gate.answers import Requests
from morph.gate.collect import force_rules, measure
from morph.gate.cost import CostTable
from morph.gate.fit import GateStack
from morph.model.model import MorphModel

BUDGETS = (0.0, 0.01, 0.02, 0.03, *(round(0.05 * i, 2) for i in range(1, 20)), 0.97, 0.98, 0.99, 1.0)
"""Calibrated budgets: steps of 0.05, closer at the ends where τ moves fast."""

GRID = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)
"""Budgets whose τ is measured; between them τ is interpolated."""

Run = Callable[[torch.Tensor], torch.Tensor]
"""Rules `[requests, taus, blocks]` to the layouts that the gates choose under them, bool, same shape."""


def saved_matrix(cost: CostTable, lengths: Sequence[int]) -> torch.Tensor:
    """c_l(n) of every request and block, float32 `[requests, blocks]`."""
    rows = [[cost.saved_seconds(block, n) for block in range(cost.num_blocks)] for n in lengths]
    return torch.tensor(rows, dtype=torch.float32)


def rules_of(tau: float, saved: torch.Tensor) -> torch.Tensor:
    """Thresholds on û of the plain policy at τ; -inf where the ssm saves nothing. The rule of `UtilityPolicy`."""
    rules = torch.full_like(saved, tau) if math.isinf(tau) else tau * saved
    return torch.where(saved <= 0, -math.inf, rules)


def budget_of(layouts: torch.Tensor, saved: torch.Tensor) -> float:
    """(Cost - C_min) / (C_attention - C_min) of layouts bool `[requests, blocks]` over their traffic.

    Costs are seconds beyond all-ssm, so that a layout costs the sum of c_l(n) over its attention blocks.
    """
    spent = torch.where(layouts, saved, 0.0).double().sum()
    least, most = saved.clamp_max(0.0).double().sum(), saved.double().sum()
    return float((spent - least) / (most - least).clamp_min(1e-30))


def offline_tau(utilities: torch.Tensor, saved: torch.Tensor, budgets: Sequence[float]) -> list[float]:
    """τ per budget if û `[requests, blocks]` did not depend on τ: a start for `calibrate`, exact for fixed û."""
    free = saved > 0
    if not bool(free.any()):
        raise InvalidRequest(
            "no prompt of the calibration traffic is long enough for the ssm to save anything; add longer prompts"
        )
    ratio = (utilities[free] / saved[free]).double()
    order = ratio.argsort(descending=True)
    spent = saved[free].double()[order].cumsum(0)
    taus = []
    for budget in budgets:
        target = budget * float(spent[-1])
        count = int((spent <= target * (1 + 1e-9)).sum())
        above = ratio[order[count - 1]] if count else ratio[order[0]] + ratio.abs().max() * 1e-3 + 1e-12
        below = ratio[order[count]] if count < len(order) else ratio[order[-1]] - ratio.abs().max() * 1e-3 - 1e-12
        taus.append(float((above + below) / 2) if count and count < len(order) else float(below if count else above))
    return taus


def calibrate(
    run: Run,
    utilities: torch.Tensor,
    saved: torch.Tensor,
    budgets: Sequence[float] = BUDGETS,
    grid: Sequence[float] = GRID,
    rounds: int = 2,
) -> tuple[list[float], list[tuple[float, float]]]:
    """τ per budget with the gates' features following their own choices.

    Args:
        run: lets the gates choose. utilities: a first guess of û `[requests, blocks]`, from any layouts.
        saved: c_l(n) of the calibration traffic. grid: budgets measured in each round; a round refines the one before.

    Returns:
        τ per budget, not ascending, and the measured points (τ, budget spent).
    """
    ends = offline_tau(utilities, saved, (0.0, 1.0))
    points = [(ends[0], 0.0), (ends[1], 1.0)]
    taus = offline_tau(utilities, saved, grid)
    for _ in range(rounds):
        layouts = run(torch.stack([rules_of(tau, saved) for tau in taus], dim=1))
        points += [(tau, budget_of(layouts[:, i], saved)) for i, tau in enumerate(taus)]
        taus = _invert(points, grid)
    return _invert(points, budgets), sorted(points)


def _invert(points: list[tuple[float, float]], budgets: Sequence[float]) -> list[float]:
    """τ where the measured budget, made monotone, meets each wanted one."""
    points = sorted(set(points))
    spent: list[float] = []
    weights: list[int] = []
    for _, budget in points:  # pool adjacent violators: the budget falls as τ rises
        spent.append(budget)
        weights.append(1)
        while len(spent) > 1 and spent[-2] < spent[-1]:
            weight = weights[-2] + weights[-1]
            pooled = (spent[-2] * weights[-2] + spent[-1] * weights[-1]) / weight
            spent[-2:], weights[-2:] = [pooled], [weight]
    falling = [value for value, weight in zip(spent, weights, strict=True) for _ in range(weight)]
    out = []
    for budget in budgets:
        over = [i for i, value in enumerate(falling) if value >= budget]
        at = over[-1] if over else 0
        if not over or at + 1 == len(points):
            out.append(points[at][0])
            continue
        (low, high), (more, less) = (points[at][0], points[at + 1][0]), (falling[at], falling[at + 1])
        out.append(low + (high - low) * ((more - budget) / (more - less) if more > less else 0.0))
    for i in range(1, len(out)):
        out[i] = min(out[i], out[i - 1])
    return out


def gated_layouts(
    model: MorphModel,
    requests: Requests,
    gates: GateStack,
    ids: Sequence[int],
    rules: torch.Tensor,
    batch_tokens: int,
) -> torch.Tensor:
    """Layouts that gates choose for the requests `ids` under rules `[requests, rules, blocks]`; bool, same shape."""
    forced = force_rules(rules, model.config)
    found = measure(
        model,
        requests,
        [(r, forced[i]) for i, r in enumerate(ids)],
        gates.to(model.embedding.weight.device),
        batch_tokens=batch_tokens,
        losses=False,
    )
    return found.layouts.view(rules.shape)


def tau_section(tau: Sequence[float], cost: CostTable) -> dict[str, Any]:
    """What config.json says of a calibration with the budgets of `BUDGETS`."""
    return {
        "policy": "utility",
        "budgets": list(BUDGETS),
        "tau": list(tau),
        "mean_answer_tokens": cost.mean_answer_tokens,
        "cost_table": "cost.json",
    }
