"""The measuring stages of a fit, each in chunks that are kept in the work folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from morph.gate.answers import Requests, sample_answers
from morph.gate.calibrate import offline_tau, rules_of, saved_matrix
from morph.gate.collect import Measurement, fixed_rules, force_rules, measure
from morph.gate.cost import CostTable
from morph.gate.fit import FitConfig, GateStack
from morph.gate.labels import fit_losses
from morph.gate.layouts import flipped, nested_layouts, random_layouts
from morph.gate.measured import Part
from morph.gate.work import Deadline, WorkFolder
from morph.model.model import MorphModel

Log = Callable[[str], None]


@dataclass(frozen=True)
class PipelineConfig:
    """How much is measured.

    Attributes:
        chain: shares of attention blocks of the static layouts that every request is measured under.
        layouts: random layouts per request beside the chain.
        pilot: requests of the first ranking, under `pilot_layouts` random layouts each.
        contest: requests on which the candidate rankings are compared.
        chunk: requests that are measured and kept together.
        own_share: share of the requests that are measured under the gates' own choices, too.
        policy_budgets, policy_counts: at these budgets, and shares of attention blocks.
        flip_rate: chance that a block is flipped in the neighbour that is measured of each own choice.
        calibration: requests that τ is calibrated on.
        batch_tokens: padded tokens per forward pass.
        answer_tokens: longest answer sampled from the base.
    """

    chain: tuple[float, ...] = (2 / 30, 4 / 30, 8 / 30, 12 / 30, 16 / 30, 22 / 30)
    layouts: int = 14
    pilot: int = 64
    pilot_layouts: int = 48
    contest: int = 160
    chunk: int = 128
    own_share: float = 0.5
    policy_budgets: tuple[float, ...] = (0.1, 0.3, 0.6)
    policy_counts: tuple[float, ...] = (0.15, 0.4)
    flip_rate: float = 0.08
    calibration: int = 240
    batch_tokens: int = 16_384
    answer_tokens: int = 64
    fit: FitConfig = field(default_factory=FitConfig)
    seed: int = 0

    @property
    def rows(self) -> int:
        """Layouts per request of the main measurement."""
        return len(self.chain) + self.layouts

    @property
    def own_rows(self) -> int:
        """Layouts per request of the round on own choices, neighbours included."""
        return 2 * (len(self.policy_budgets) + len(self.policy_counts))


@dataclass
class Run:
    """What the stages share."""

    model: MorphModel
    requests: Requests
    config: PipelineConfig
    work: WorkFolder
    deadline: Deadline
    log: Log

    @property
    def blocks(self) -> int:
        """Blocks of the model."""
        return self.model.config.num_blocks

    @property
    def adaptive(self) -> list[int]:
        """Blocks that have a choice."""
        return [block for block, kind in enumerate(self.model.config.block_kinds) if kind == "adaptive"]

    def note(self, text: str) -> None:
        """Say how far it is, with the time."""
        self.log(f"[{self.deadline.elapsed:6.1f} s] {text}")

    def generator(self, stage: int, chunk: int = 0) -> torch.Generator:
        """Random numbers of one chunk of one stage, the same in every run."""
        return torch.Generator().manual_seed((self.config.seed * 1009 + stage) * 100_003 + chunk)

    def counts(self, shares: Sequence[float]) -> list[int]:
        """Numbers of attention blocks, each once."""
        return sorted({max(1, round(share * self.blocks)) for share in shares})

    def measure(self, ids: Sequence[int], layouts: Sequence[torch.Tensor], keep_features: bool = False) -> Measurement:
        """Requests under bool layouts `[rows, blocks]` each; static blocks keep their mixer."""
        rules = [force_rules(fixed_rules(rows), self.model.config) for rows in layouts]
        jobs = list(zip(ids, rules, strict=True))
        return measure(
            self.model, self.requests, jobs, keep_features=keep_features, batch_tokens=self.config.batch_tokens
        )


def answers(run: Run, ids: Sequence[int]) -> None:
    """Give each of the requests `ids` that has no answer the base's own, in chunks."""
    requests, config = run.requests, run.config
    if not requests.answers:
        requests.answers = [[] for _ in requests.prompts]
    missing = [i for i in sorted(ids) if not requests.answers[i]]
    for number, begin in enumerate(range(0, len(missing), config.chunk)):
        chosen, name = missing[begin : begin + config.chunk], f"answers/{number:04d}.json"
        if not run.work.has(name):
            run.deadline.check("answers")
            prompts = [requests.prompts[i] for i in chosen]
            run.work.write_json(
                name,
                sample_answers(
                    run.model,
                    prompts,
                    config.answer_tokens,
                    seed=config.seed + number,
                    batch_tokens=config.batch_tokens,
                ),
            )
            run.note(f"answers of {min(begin + config.chunk, len(missing))} of {len(missing)} requests")
        for i, answer in zip(chosen, run.work.read_json(name), strict=True):
            requests.answers[i] = answer


def pilot(run: Run, ids: Sequence[int]) -> tuple[list[int], float, list[Part]]:
    """A first ranking, from random layouts of a few requests.

    Returns:
        Blocks, most sensitive first; nominal tokens per second, measured on the second half; the rows.
    """
    config, parts = run.config, []
    begins = [0, len(ids) // 2, len(ids)]
    for half in (0, 1):
        name, chosen = f"pilot/{half}", ids[begins[half] : begins[half + 1]]
        if not run.work.has(f"{name}.npz"):
            run.deadline.check("pilot")
            generator = run.generator(1, half)
            order = list(range(run.blocks))
            layouts = [random_layouts(order, config.pilot_layouts, generator) for _ in chosen]
            began = time.perf_counter()
            part = Part.of(run.measure(chosen, layouts), torch.empty(0, dtype=torch.long))
            seconds = time.perf_counter() - began
            tokens = nominal_tokens(run.requests, chosen) * (config.pilot_layouts + 1)
            run.work.write_json("pilot/speed.json", tokens / seconds)
            part.save(run.work, name)
        parts.append(Part.load(run.work, name))
    whole = torch.cat([part.request for part in parts])
    place = {request: i for i, request in enumerate(ids)}
    owner = torch.tensor([place[int(r)] for r in whole])
    losses = fit_losses(
        torch.cat([part.loss for part in parts]), torch.cat([part.layouts for part in parts]), owner, len(ids)
    )
    return losses.ranking(), float(run.work.read_json("pilot/speed.json")), parts


def nominal_tokens(requests: Requests, ids: Sequence[int]) -> int:
    """Prompt and answer tokens of requests."""
    return sum(len(requests.prompts[i]) + len(requests.answers[i]) for i in ids)


def base_rows(run: Run, ids: Sequence[int], ranking: Sequence[int]) -> list[Part]:
    """The main measurement: chain and random layouts of every request, features of four of them."""
    config, parts = run.config, []
    chain = nested_layouts(ranking, run.counts(config.chain))
    per = len(chain) + config.layouts
    kept = sorted({len(chain) // 2 - 1, len(chain) // 2, per - 2, per - 1} & set(range(per)))
    for number, begin in enumerate(range(0, len(ids), config.chunk)):
        name, chosen = f"base/{number:04d}", ids[begin : begin + config.chunk]
        if not run.work.has(f"{name}.npz"):
            run.deadline.check("measurement")
            generator = run.generator(2, number)
            layouts = [torch.cat([chain, random_layouts(ranking, config.layouts, generator)]) for _ in chosen]
            found = run.measure(chosen, layouts, keep_features=True)
            keep = (torch.arange(len(chosen))[:, None] * per + torch.tensor(kept)).flatten()
            Part.of(found, keep).save(run.work, name)
            run.note(f"measured {begin + len(chosen)} of {len(ids)} requests, mean loss {float(found.loss.mean()):.4f}")
        parts.append(Part.load(run.work, name))
    return parts


def contest(run: Run, ids: Sequence[int], rankings: dict[str, list[int]]) -> tuple[list[int], dict[str, float], Part]:
    """The static ranking whose measured losses are lowest.

    Returns:
        The ranking; of each candidate the geometric mean of its mean losses; the rows.
    """
    counts = run.counts((*run.config.fit.counts, 12 / 30))
    if not run.work.has("contest/0.npz"):
        run.deadline.check("contest of rankings")
        layouts = torch.cat([nested_layouts(ranking, counts) for ranking in rankings.values()])
        found = run.measure(ids, [layouts] * len(ids))
        Part.of(found, torch.empty(0, dtype=torch.long)).save(run.work, "contest/0")
    part = Part.load(run.work, "contest/0")
    means = part.loss.view(len(ids), len(rankings), len(counts)).double().mean(0).clamp_min(1e-9)
    scores = {name: float(row.log().mean().exp()) for name, row in zip(rankings, means, strict=True)}
    best = min(scores, key=scores.__getitem__)
    run.note(f"best static ranking: {best} ({', '.join(f'{k} {v:.4f}' for k, v in scores.items())})")
    return rankings[best], scores, part


def own_choices(
    run: Run,
    ids: Sequence[int],
    gates: GateStack,
    everyone: Sequence[int],
    predicted: torch.Tensor,
    cost: CostTable,
) -> tuple[list[Part], list[Part]]:
    """The gates' own layouts at several budgets (with features), and a neighbour of each, for the requests `ids`.

    Args:
        predicted: û of the requests `everyone`, `[requests, blocks]`: sets τ.
    """
    config = run.config

    def costs(of: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return saved_matrix(cost, [len(run.requests.prompts[r]) for r in of]), flat_costs(run, len(of))

    (saved, flat), (all_saved, all_flat) = costs(ids), costs(everyone)
    rules = [rules_of(tau, saved) for tau in offline_tau(predicted, all_saved, config.policy_budgets)]
    rules += [rules_of(tau, flat) for tau in offline_tau(predicted, all_flat, config.policy_counts)]
    stacked = force_rules(torch.stack(rules, dim=1), run.model.config)
    device = run.model.embedding.weight.device
    own, around = [], []
    for number, begin in enumerate(range(0, len(ids), config.chunk)):
        chosen = ids[begin : begin + config.chunk]
        if not run.work.has(f"around/{number:04d}.npz"):
            run.deadline.check("own choices")
            jobs = [(r, stacked[begin + i]) for i, r in enumerate(chosen)]
            found = measure(
                run.model, run.requests, jobs, gates.to(device), keep_features=True, batch_tokens=config.batch_tokens
            )
            Part.of(found, torch.arange(len(found))).save(run.work, f"own/{number:04d}")
            near = flipped(found.layouts, config.flip_rate, run.generator(3, number)).view(len(chosen), -1, run.blocks)
            beside = run.measure(chosen, list(near))
            Part.of(beside, torch.empty(0, dtype=torch.long)).save(run.work, f"around/{number:04d}")
            run.note(f"own choices of {begin + len(chosen)} of {len(ids)} requests")
        own.append(Part.load(run.work, f"own/{number:04d}"))
        around.append(Part.load(run.work, f"around/{number:04d}"))
    return own, around


def flat_costs(run: Run, rows: int) -> torch.Tensor:
    """One per adaptive block and request: then τ counts blocks. Static blocks save nothing."""
    flat = torch.zeros(rows, run.blocks)
    flat[:, run.adaptive] = 1.0
    return flat


def planned_requests(run: Run, available: int, rate: float, mean_tokens: float) -> int:
    """Requests that fit the time limit at a measured speed, at least the pilot's, at most all."""
    if math.isinf(run.deadline.left):
        return available
    config = run.config
    per_request = config.rows + 1 + config.own_share * (config.own_rows + 2)
    rankings = 3 * (len(config.fit.counts) + 1)
    fixed = min(config.contest, available) * rankings + min(config.calibration, available) * 24
    # A tenth and half a minute for fitting, reading and writing.
    seconds = 0.9 * run.deadline.left - 30
    count = int((seconds * rate / mean_tokens - fixed) / per_request)
    return max(min(config.pilot, available), min(count, available))
