"""Gates for a model, end to end: measure layouts, fit utilities, regress gates, one round on their own choices, calibrate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from morph.gate.answers import Requests
from morph.gate.calibrate import BUDGETS, budget_of, calibrate, offline_tau, rules_of, saved_matrix
from morph.gate.collect import Measurement, fixed_rules, measure, with_log_length
from morph.gate.cost import CPU_RATES, CostTable, DeviceRates
from morph.gate.fit import FitConfig, GateStack, fit_gates
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
    fit: FitConfig = field(default_factory=FitConfig)
    seed: int = 0


@dataclass
class GateFit:
    """What the pipeline makes.

    Attributes:
        gates: on the CPU. tau: per budget of `BUDGETS`. spent: budget that each τ really spends on the calibration traffic.
        ranking: best static order of blocks, most sensitive first. r2: per block, on held-out requests.
    """

    gates: GateStack
    cost: CostTable
    budgets: tuple[float, ...]
    tau: list[float]
    spent: list[float]
    ranking: list[int]
    r2: list[float]
    measurements: list[Measurement]


def static_ranking(
    model: MorphModel, requests: Requests, rows: list[int], config: PipelineConfig, log: Log
) -> list[int]:
    """Blocks in the order in which a static layout should get attention.

    Greedy: from all-ssm on, the block whose attention lowers the mean loss most. Else by a regression on random layouts.
    """
    blocks = model.config.num_blocks
    generator = torch.Generator().manual_seed(config.seed)
    if not config.greedy:
        layouts = random_layouts(list(range(blocks)), max(2 * blocks, 24), generator)
        found = measure(
            model, requests, [(r, fixed_rules(layouts)) for r in rows], batch_tokens=config.batch_tokens
        )
        index = torch.tensor([rows.index(int(r)) for r in found.request])
        return ranking_of(fit_utilities(found.loss, found.layouts, index, len(rows)).utility)
    ranking: list[int] = []
    for _ in range(blocks):
        left = [block for block in range(blocks) if block not in ranking]
        layouts = torch.zeros(len(left), blocks, dtype=torch.bool)
        layouts[:, ranking] = True
        layouts[torch.arange(len(left)), torch.tensor(left)] = True
        found = measure(
            model, requests, [(r, fixed_rules(layouts)) for r in rows], batch_tokens=config.batch_tokens
        )
        mean = found.loss.view(len(rows), len(left)).mean(0)
        ranking.append(left[int(mean.argmin())])
        log(f"ranking {len(ranking):2d}: block {ranking[-1]:2d}, mean loss {float(mean.min()):.4f}")
    return ranking


def random_rules(
    ranking: list[int], count: int, config: PipelineConfig, generator: torch.Generator
) -> torch.Tensor:
    """Chain and random layouts of one request, as rules `[chain + layouts, blocks]`."""
    del count
    chain = nested_layouts(ranking, [k for k in config.chain if k <= len(ranking)])
    return fixed_rules(torch.cat([chain, random_layouts(ranking, config.layouts, generator)]))


def flipped(layouts: torch.Tensor, config: PipelineConfig, generator: torch.Generator) -> torch.Tensor:
    """`config.flips` perturbations of each layout, bool `[rows * flips, blocks]`; at least one block differs."""
    many = layouts.repeat_interleave(config.flips, dim=0)
    flips = torch.rand(many.shape, generator=generator) < config.flip_rate
    sure = torch.randint(many.shape[1], (len(many),), generator=generator)
    flips[torch.arange(len(many)), sure] = True
    return many ^ flips


def regress(
    measurements: list[Measurement],
    requests: Requests,
    train: list[int],
    held: list[int],
    fit: FitConfig,
    weights: list[float],
) -> tuple[GateStack, list[float], torch.Tensor]:
    """Utilities from all rows, gates from the rows with features.

    Returns:
        Gates, held-out r² per block, and the utilities `[requests, blocks]` of all requests (nan where unmeasured).
    """
    known = sorted({int(r) for m in measurements for r in m.request.unique()})
    place = torch.full((len(requests),), -1)
    place[torch.tensor(known)] = torch.arange(len(known))
    request = torch.cat([m.request for m in measurements])
    weight = torch.cat([torch.full((len(m),), w) for m, w in zip(measurements, weights, strict=True)])
    found = fit_utilities(
        torch.cat([m.loss for m in measurements]),
        torch.cat([m.layouts for m in measurements]),
        place[request],
        len(known),
        weight,
    )
    with_features = [m for m in measurements if m.features is not None]
    features = torch.cat([m.features for m in with_features if m.features is not None])
    owner = torch.cat([m.request for m in with_features])
    lengths = torch.tensor(requests.lengths)[owner].to(features.device)
    targets = found.utility[place[owner]].to(features.device)
    side = torch.zeros(len(requests), dtype=torch.int8)
    side[torch.tensor(train)], side[torch.tensor(held)] = 1, 2
    rows = side[owner].to(features.device)

    def read(block: int, index: torch.Tensor) -> torch.Tensor:
        return with_log_length(features[index, block], lengths[index])

    gates, report = fit_gates(
        read, targets, (rows == 1).nonzero().squeeze(1), (rows == 2).nonzero().squeeze(1), fit
    )
    utilities = torch.full((len(requests), found.utility.shape[1]), torch.nan)
    utilities[torch.tensor(known)] = found.utility
    return gates, report["r2"], utilities


def run_pipeline(
    model: MorphModel,
    requests: Requests,
    config: PipelineConfig | None = None,
    train: str = "train",
    held: str = "held",
    log: Log = print,
    ranking: list[int] | None = None,
) -> GateFit:
    """Fit and calibrate gates.

    Args:
        requests: with answers; `train` and `held` name the splits for fitting and for stopping and calibration.
        ranking: a known static ranking; None measures one.
    """
    config = config or PipelineConfig()
    began = time.perf_counter()

    def note(text: str) -> None:
        log(f"[{time.perf_counter() - began:6.1f} s] {text}")

    fitting, holding = requests.where(train), requests.where(held)
    generator = torch.Generator().manual_seed(config.seed + 1)
    if ranking is None:
        ranking = static_ranking(model, requests, fitting[: config.pilot], config, note)
    cost = CostTable.analytic(model.config, config.rates, requests.mean_answer_tokens)
    everyone = fitting + holding
    jobs = [(r, random_rules(ranking, r, config, generator)) for r in everyone]
    measurements = [measure(model, requests, jobs, keep_features=True, batch_tokens=config.batch_tokens)]
    note(
        f"measured {len(measurements[0])} rows of {len(everyone)} requests, mean loss {measurements[0].loss.mean():.4f}"
    )
    weights = [1.0]
    gates, r2, utilities = regress(measurements, requests, fitting, holding, config.fit, weights)
    note(f"round 0: held-out r2 {sum(r2) / len(r2):.3f}")
    for number in range(config.rounds):
        own, around = own_choices(model, requests, gates, utilities, everyone, cost, config, generator)
        measurements += [own, around]
        weights += [2.0, 2.0]
        gates, r2, utilities = regress(measurements, requests, fitting, holding, config.fit, weights)
        note(f"round {number + 1}: {len(own) + len(around)} rows, held-out r2 {sum(r2) / len(r2):.3f}")
    tau, spent = calibrate_gates(model, requests, gates, utilities, holding, cost, config)
    note(f"calibrated on {len(holding)} requests")
    return GateFit(gates.to("cpu"), cost, BUDGETS, tau, spent, ranking, r2, measurements)


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
) -> tuple[list[float], list[float]]:
    """τ of every budget over the traffic `rows`; see `calibrate`."""
    saved = saved_matrix(cost, [len(requests.prompts[r]) for r in rows])

    def run(rules: torch.Tensor) -> torch.Tensor:
        jobs = [(r, rules[i : i + 1]) for i, r in enumerate(rows)]
        return measure(model, requests, jobs, gates, batch_tokens=config.batch_tokens).layouts

    return calibrate(run, utilities[rows], saved)


def spending(layouts: torch.Tensor, saved: torch.Tensor) -> float:
    """The budget that layouts spend; see `budget_of`."""
    return budget_of(layouts, saved)
