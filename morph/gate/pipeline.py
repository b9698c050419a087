"""Gates for a model, end to end: answers, ranking, measurement, fit, a round on own choices, refit, calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from morph.errors import InvalidRequest
from morph.gate import stages
from morph.gate.calibrate import calibrate, gated_layouts, offline_tau, saved_matrix, tau_section
from morph.gate.cost import CostTable
from morph.gate.fit import GateFit, GateStack, fit_gates
from morph.gate.measured import Fitted, Part, fit_measured, joined, pack
from morph.gate.report import kinds_summary, light_features
from morph.gate.stages import Run
from morph.gate.work import LIGHT, OutOfTime

MIN_REQUESTS = 16
"""Fewer would leave folds of one or two requests."""


@dataclass
class FittedGates:
    """What a run makes: the gates, their cost table and the `gate` section of config.json."""

    gates: GateStack
    cost: CostTable
    section: dict[str, Any]


def pool_of(run: Run) -> list[int]:
    """Requests that may be fitted on, in a random order that is the same in every run; never the split `eval`.

    Raises:
        InvalidRequest: too few.
    """
    usable = run.requests.where("train", "held")
    if len(usable) < MIN_REQUESTS:
        raise InvalidRequest(
            f"{len(usable)} requests to fit on are too few, want at least {MIN_REQUESTS}; give more prompts "
            "(splits `train` and `held` count)"
        )
    order = torch.randperm(len(usable), generator=run.generator(0)).tolist()
    return [usable[i] for i in order]


def fit_model(run: Run, kept_cost: CostTable | None, count: int | None) -> FittedGates:
    """Run all stages that the work folder does not have yet.

    Args:
        kept_cost: a measured cost table to go on with; None makes an analytic one for this traffic.
        count: requests to fit on; None = as many as fit the time limit.

    Raises:
        OutOfTime: the limit came first. InvalidRequest: requests that gates cannot be fitted on.
    """
    parts: list[Part] = []
    try:
        return _fit_model(run, kept_cost, count, parts)
    except OutOfTime:
        _keep_losses(run, parts)
        raise


def _fit_model(run: Run, kept_cost: CostTable | None, count: int | None, parts: list[Part]) -> FittedGates:
    config, requests, work = run.config, run.requests, run.work
    ids = pool_of(run)
    if count is not None and not MIN_REQUESTS <= count <= len(ids):
        raise InvalidRequest(
            f"--prompts {count} is not between {MIN_REQUESTS} and the {len(ids)} requests that there are"
        )
    stages.answers(run, ids)
    mean_answer = sum(len(requests.answers[i]) for i in ids) / len(ids)
    cost = kept_cost or CostTable.analytic(run.model.config, mean_answer_tokens=mean_answer)
    # Whether the ssm saves anything at all, before hours are spent.
    lengths = [len(requests.prompts[i]) for i in ids]
    offline_tau(torch.ones(len(ids), run.blocks), saved_matrix(cost, lengths), (0.5,))

    first, rate, pilot_parts = stages.pilot(run, ids[: min(config.pilot, count or len(ids))])
    if not work.has("plan.json"):
        mean_tokens = stages.nominal_tokens(requests, ids) / len(ids)
        planned = count or stages.planned_requests(run, len(ids), rate, mean_tokens)
        work.write_json("plan.json", {"requests": planned, "tokens_per_second": round(rate)})
        run.note(f"{rate:,.0f} tokens/s: {planned} of {len(ids)} requests")
    ids = ids[: work.read_json("plan.json")["requests"]]
    parts += pilot_parts
    base = stages.base_rows(run, ids, first)
    parts += base
    device = run.model.embedding.weight.device
    fitted = fit_measured(parts, [1.0] * len(parts), requests, device)
    rankings = {"pilot": first, "marginal": fitted.losses.ranking(), "greedy": fitted.losses.greedy_ranking()}
    ranking, scores, contest = stages.contest(run, ids[: config.contest], rankings)
    parts.append(contest)
    early = _fit(run, fitted, ranking, rankings)
    _note_fit(run, "first fit", early)

    own_ids = ids[: max(1, round(config.own_share * len(ids)))]
    own, around = stages.own_choices(run, own_ids, early.gates, fitted.ids, early.predicted, cost)
    weights = [1.0] * len(parts) + [2.0] * (len(own) + len(around))
    parts += own + around
    fitted = fit_measured(parts, weights, requests, device)
    final = _fit(run, fitted, ranking, rankings)
    _note_fit(run, "final fit", final)
    section = _calibration(run, fitted, final, cost, ids)
    rows = sum(len(part.request) for part in parts)
    section |= {
        "static_ranking": ranking,
        "kinds": kinds_summary(requests, fitted.ids, final.predicted, cost, section["budgets"], section["tau"]),
        "fit": {
            "requests": len(ids),
            "rows": rows,
            "penalty": final.penalty,
            "deviation": final.deviation,
            "pair_ridge": fitted.losses.pair_ridge,
            **_chosen(final),
        },
    }
    run.work.write_json(
        f"{LIGHT}/meta.json",
        {
            "section": section,
            "plan": work.read_json("plan.json"),
            "rankings": rankings,
            "ranking_scores": scores,
            "candidates": final.candidates,
            "r2": final.r2,
            "ids": fitted.ids,
        },
    )
    _keep_losses(run, parts)
    for name, tensors in light_features(fitted).items():
        work.write_tensors(f"{LIGHT}/{name}", tensors)
    tensors = final.gates.tensors(run.adaptive)
    work.write_tensors(f"{LIGHT}/gate.safetensors", tensors)
    work.write_json(f"{LIGHT}/cost.json", cost.to_dict())
    return FittedGates(final.gates, cost, section)


def _fit(run: Run, fitted: Fitted, ranking: list[int], rankings: dict[str, list[int]]) -> GateFit:
    lengths = [len(run.requests.prompts[r]) for r in fitted.ids]
    return fit_gates(
        fitted.rows, fitted.losses, ranking, list(rankings.values()), lengths, run.adaptive, run.config.fit
    )


def _chosen(fit: GateFit) -> dict[str, float]:
    """Cross-validated ratios of the chosen candidate."""
    row = next(c for c in fit.candidates if c["penalty"] == fit.penalty and c["deviation"] == fit.deviation)
    return {name: round(row[name], 4) for name in ("vs_static", "vs_shuffled")}


def _note_fit(run: Run, what: str, fit: GateFit) -> None:
    ratios = _chosen(fit)
    known = [r2 for r2 in fit.r2 if r2 == r2]
    run.note(
        f"{what}: penalty {fit.penalty}, deviations × {fit.deviation}; on requests that the fit did not see, modelled "
        f"loss {ratios['vs_static']} of the best static layout's and {ratios['vs_shuffled']} of shuffled layouts', "
        f"r² {sum(known) / len(known):.3f}"
    )


def _calibration(run: Run, fitted: Fitted, fit: GateFit, cost: CostTable, ids: list[int]) -> dict[str, Any]:
    """τ of every budget, and of some mean counts of attention blocks."""
    if run.work.has("calibration.json"):
        section: dict[str, Any] = run.work.read_json("calibration.json")
        return section
    place = {request: i for i, request in enumerate(fitted.ids)}
    chosen = ids[: run.config.calibration]
    if not bool((saved_matrix(cost, [len(run.requests.prompts[r]) for r in chosen]) > 0).any()):
        chosen = ids  # few requests, and the long ones come later: without them a budget means nothing
    predicted = fit.predicted[[place[r] for r in chosen]]

    def choices(rules: torch.Tensor) -> torch.Tensor:
        run.deadline.check("calibration")
        return gated_layouts(run.model, run.requests, fit.gates, chosen, rules, run.config.batch_tokens)

    saved = saved_matrix(cost, [len(run.requests.prompts[r]) for r in chosen])
    tau, _ = calibrate(choices, predicted, saved)
    shares = run.config.fit.counts
    counts, _ = calibrate(choices, predicted, stages.flat_costs(run, len(chosen)), shares, shares)
    names = [str(max(1, round(share * len(run.adaptive)))) for share in shares]
    section = tau_section(tau, cost) | {"count_tau": dict(zip(names, counts, strict=True))}
    run.work.write_json("calibration.json", section)
    run.note(f"calibrated on {len(chosen)} requests")
    return section


def _keep_losses(run: Run, parts: list[Part]) -> None:
    if parts:
        run.work.write_arrays(f"{LIGHT}/losses.npz", pack(joined(parts)))
