"""Gates for a model, end to end: measure layouts, fit utilities, regress, a round on own choices, calibrate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from morph.errors import InvalidRequest
from morph.gate.answers import Requests
from morph.gate.calibrate import BUDGETS, calibrate, offline_tau, rules_of, saved_matrix
from morph.gate.collect import Measurement, fixed_rules, measure, with_log_length
from morph.gate.cost import CPU_RATES, CostTable, DeviceRates
from morph.gate.evaluate import surrogate_ratio
from morph.gate.fit import FitConfig, GateStack, fit_gates, make_projection
from morph.gate.labels import fit_utilities, nested_layouts, random_layouts, ranking_of
from morph.model.model import MorphModel

Log = Callable[[str], None]


@dataclass(frozen=True)
class PipelineConfig:
    """How much is measured.

    Attributes:
        chain: attention counts of the nested static layouts that every request is measured under.
        layouts: random layouts per request beside the chain.
        pilot: requests that the static ranking is made on. greedy: rank by greedy selection, else by regression.
        policy_budgets: budgets of the round on the gates' own choices; 0 rounds skip it.
        flips: perturbed layouts around each own choice; flip_rate: chance that a block is flipped in them.
        batch_tokens: padded tokens per forward pass.
        fits: candidates; the one whose held-out decisions are best is kept.
    """

    chain: tuple[int, ...] = (0, 1, 2, 4, 8, 12, 16, 22)
    layouts: int = 16
    pilot: int = 64
    greedy: bool = True
    rounds: int = 1
    policy_budgets: tuple[float, ...] = (0.1, 0.3, 0.6)
    policy_counts: tuple[float, ...] = (0.15, 0.4)
    flips: int = 3
    flip_rate: float = 0.08
    batch_tokens: int = 65_536
    rates: DeviceRates = CPU_RATES
    fits: tuple[FitConfig, ...] = (FitConfig(), FitConfig(rank=32, dropout=0.1), FitConfig(rank=64, dropout=0.4))
    seed: int = 0


@dataclass
class GateFit:
    """What the pipeline makes.

    Attributes:
        gates: on the CPU. tau: per budget of `BUDGETS`. points: measured (τ, budget spent) on the calibration traffic.
        ranking: best static order of blocks, most sensitive first. r2: per block, on held-out requests.
    """

    gates: GateStack
    cost: CostTable
    budgets: tuple[float, ...]
    tau: list[float]
    points: list[tuple[float, float]]
    ranking: list[int]
    r2: list[float]
    measurements: list[Measurement]
    utilities: torch.Tensor


def static_ranking(
    model: MorphModel, requests: Requests, rows: list[int], config: PipelineConfig, log: Log
) -> list[int]:
    """Blocks in the order in which a static layout should get attention.

    Greedy: from all-ssm on, the block whose attention lowers the mean loss most. Else by regression on random ones.
    """
    blocks = model.config.num_blocks
    generator = torch.Generator().manual_seed(config.seed)
    if not config.greedy:
        layouts = random_layouts(list(range(blocks)), max(2 * blocks, 24), generator)
        found = measure(model, requests, [(r, fixed_rules(layouts)) for r in rows], batch_tokens=config.batch_tokens)
        index = torch.tensor([rows.index(int(r)) for r in found.request])
        return ranking_of(fit_utilities(found.loss, found.layouts, index, len(rows)).utility)
    ranking: list[int] = []
    for _ in range(blocks):
        left = [block for block in range(blocks) if block not in ranking]
        layouts = torch.zeros(len(left), blocks, dtype=torch.bool)
        layouts[:, ranking] = True
        layouts[torch.arange(len(left)), torch.tensor(left)] = True
        found = measure(model, requests, [(r, fixed_rules(layouts)) for r in rows], batch_tokens=config.batch_tokens)
        mean = found.loss.view(len(rows), len(left)).mean(0)
        ranking.append(left[int(mean.argmin())])
        log(f"ranking {len(ranking):2d}: block {ranking[-1]:2d}, mean loss {float(mean.min()):.4f}")
    return ranking


def random_rules(ranking: list[int], config: PipelineConfig, generator: torch.Generator) -> torch.Tensor:
    """Chain and random layouts of one request, as rules `[chain + layouts, blocks]`."""
    chain = nested_layouts(ranking, [k for k in config.chain if k <= len(ranking)])
    return fixed_rules(torch.cat([chain, random_layouts(ranking, config.layouts, generator)]))


def flipped(layouts: torch.Tensor, config: PipelineConfig, generator: torch.Generator) -> torch.Tensor:
    """`config.flips` perturbations of each layout, bool `[rows * flips, blocks]`; at least one block differs."""
    many = layouts.repeat_interleave(config.flips, dim=0)
    flips = torch.rand(many.shape, generator=generator) < config.flip_rate
    sure = torch.randint(many.shape[1], (len(many),), generator=generator)
    flips[torch.arange(len(many)), sure] = True
    return many ^ flips


def utilities_of(measurements: list[Measurement], requests: Requests, weights: list[float]) -> torch.Tensor:
    """Utilities of all measured requests, float32 `[requests, blocks]`, nan where there is no measurement."""
    known = torch.cat([m.request for m in measurements]).unique()
    place = torch.full((len(requests),), -1)
    place[known] = torch.arange(len(known))
    found = fit_utilities(
        torch.cat([m.loss for m in measurements]),
        torch.cat([m.layouts for m in measurements]),
        place[torch.cat([m.request for m in measurements])],
        len(known),
        torch.cat([torch.full((len(m),), w) for m, w in zip(measurements, weights, strict=True)]),
    ).utility
    utilities = torch.full((len(requests), found.shape[1]), torch.nan)
    utilities[known] = found
    return utilities


def regress(
    measurements: list[Measurement],
    utilities: torch.Tensor,
    requests: Requests,
    train: list[int],
    held: list[int],
    candidates: Sequence[FitConfig],
    ranking: list[int],
    log: Log,
) -> tuple[GateStack, list[float]]:
    """Gates from the rows that have features: of the candidates, the one whose held-out decisions are best.

    Returns:
        Gates and their held-out r² per block.
    """
    measurements = [m for m in measurements if m.features is not None]
    features = torch.cat([m.features for m in measurements if m.features is not None])
    owner = torch.cat([m.request for m in measurements])
    lengths = torch.tensor(requests.lengths)[owner].to(features.device)
    targets = utilities[owner].to(features.device)
    side = torch.zeros(len(requests), dtype=torch.int8)
    side[train], side[held] = 1, 2
    rows = side[owner].to(features.device)
    fitting, holding = (rows == 1).nonzero().squeeze(1), (rows == 2).nonzero().squeeze(1)

    def read(block: int, index: torch.Tensor) -> torch.Tensor:
        return with_log_length(features[index, block], lengths[index])

    projection = make_projection(read, fitting, targets.shape[1], max(c.rank for c in candidates))
    best: tuple[float, GateStack, list[float]] | None = None
    for candidate in candidates:
        gates, r2 = fit_gates(read, targets, fitting, holding, candidate, projection)
        predicted = torch.stack([gates(block, read(block, holding)) for block in range(targets.shape[1])], dim=1)
        ratio = surrogate_ratio(predicted, targets[holding], ranking)
        log(f"  rank {candidate.rank}, dropout {candidate.dropout}: r2 {sum(r2) / len(r2):.3f}, ratio {ratio:.4f}")
        if best is None or ratio < best[0]:
            best = (ratio, gates, r2)
    assert best is not None, "give at least one candidate"
    return best[1], best[2]


def own_choices(
    model: MorphModel,
    requests: Requests,
    gates: GateStack,
    utilities: torch.Tensor,
    rows: list[int],
    cost: CostTable,
    config: PipelineConfig,
    generator: torch.Generator,
) -> tuple[Measurement, Measurement]:
    """The gates' own layouts at several budgets (with features), and perturbations around them."""
    saved = saved_matrix(cost, [len(requests.prompts[r]) for r in rows])
    flat = torch.ones_like(saved)
    rules = [rules_of(tau, saved) for tau in offline_tau(utilities[rows], saved, config.policy_budgets)]
    rules += [rules_of(tau, flat) for tau in offline_tau(utilities[rows], flat, config.policy_counts)]
    stacked = torch.stack(rules, dim=1)
    jobs = [(r, stacked[i]) for i, r in enumerate(rows)]
    own = measure(model, requests, jobs, gates, keep_features=True, batch_tokens=config.batch_tokens)
    around = flipped(own.layouts, config, generator).view(len(rows), -1, saved.shape[1])
    jobs = [(r, fixed_rules(around[i])) for i, r in enumerate(rows)]
    return own, measure(model, requests, jobs, batch_tokens=config.batch_tokens)


def calibrate_gates(
    model: MorphModel,
    requests: Requests,
    gates: GateStack,
    utilities: torch.Tensor,
    rows: list[int],
    cost: CostTable,
    config: PipelineConfig,
) -> tuple[list[float], list[tuple[float, float]]]:
    """τ of every budget over the traffic `rows`; see `calibrate`."""
    saved = saved_matrix(cost, [len(requests.prompts[r]) for r in rows])

    def run(rules: torch.Tensor) -> torch.Tensor:
        jobs = [(r, rules[i]) for i, r in enumerate(rows)]
        found = measure(model, requests, jobs, gates, batch_tokens=config.batch_tokens, losses=False)
        return found.layouts.view(rules.shape)

    return calibrate(run, utilities[rows], saved)


def run_pipeline(
    model: MorphModel,
    requests: Requests,
    config: PipelineConfig | None = None,
    log: Log = print,
    ranking: list[int] | None = None,
    save: Callable[[list[Measurement], torch.Tensor], None] | None = None,
) -> GateFit:
    """Fit and calibrate gates.

    Args:
        requests: with answers; split `train` is fitted on, split `held` decides when to stop and calibrates.
        ranking: a known static ranking; None measures one.
        save: called with all measurements and utilities whenever there are new ones, so that a long run loses little.

    Raises:
        InvalidRequest: one of the splits is empty.
    """
    config = config or PipelineConfig()
    began = time.perf_counter()

    def note(text: str) -> None:
        log(f"[{time.perf_counter() - began:6.1f} s] {text}")

    fitting, holding = requests.where("train"), requests.where("held")
    if len(fitting) < 2 or len(holding) < 2:
        raise InvalidRequest(
            f"{len(fitting)} requests to fit on and {len(holding)} held out are too few; give more prompts"
        )
    generator = torch.Generator().manual_seed(config.seed + 1)
    if ranking is None:
        ranking = static_ranking(model, requests, fitting[: config.pilot], config, note)
    cost = CostTable.analytic(model.config, config.rates, requests.mean_answer_tokens)
    everyone = fitting + holding
    jobs = [(r, random_rules(ranking, config, generator)) for r in everyone]
    measurements = [measure(model, requests, jobs, keep_features=True, batch_tokens=config.batch_tokens)]
    weights = [1.0]
    note(f"{len(measurements[0])} rows of {len(everyone)} requests, mean loss {measurements[0].loss.mean():.4f}")

    def refit(fits: Sequence[FitConfig]) -> tuple[torch.Tensor, GateStack, list[float]]:
        utilities = utilities_of(measurements, requests, weights)
        if save is not None:
            save(measurements, utilities)
        return utilities, *regress(measurements, utilities, requests, fitting, holding, fits, ranking, note)

    # The gates of the first round only choose where to look next.
    utilities, gates, r2 = refit(config.fits if not config.rounds else config.fits[:1])
    for number in range(config.rounds):
        own, around = own_choices(model, requests, gates, utilities, everyone, cost, config, generator)
        measurements += [own, around]
        weights += [2.0, 2.0]
        note(f"round {number + 1}: {len(own) + len(around)} rows around the gates' own choices")
        utilities, gates, r2 = refit(config.fits)
    tau, points = calibrate_gates(model, requests, gates, utilities, holding, cost, config)
    note(f"calibrated on {len(holding)} requests")
    return GateFit(gates.to("cpu"), cost, BUDGETS, tau, points, ranking, r2, measurements, utilities)
