"""Which layouts are compared, and which layout each request gets under each.

Static, alternating, evenly placed and random layouts are forced on every request; where attention is both cheaper and
better, as for short prompts, they take it there too, exactly as the gates do, so that what is compared is the choice on
prompts where there is one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from morph.config import ModelConfig
from morph.engine.params import SamplingParams
from morph.errors import InvalidRequest
from morph.gate.calibrate import budget_of
from morph.gate.evaluate import shuffle_within_buckets
from morph.gate.layouts import nested_layouts
from morph.layout import Layout

KINDS = {
    "attention": None,
    "ssm": None,
    "auto": "budget",
    "static": "budget",
    "shuffled": "budget",
    "alternating": None,
    "nemotron": "blocks",
    "random": "share",
    "chain": "count",
    "oracle": "items",
}
"""Kind -> what its number means."""

DEFAULTS = {"nemotron": 0.08, "random": 0.5, "oracle": 32.0}
"""Numbers of kinds that may be written without one: Nemotron-H has attention in about 8 % of its layers."""

CHAIN_SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
"""Attention blocks of the oracle's static chain, as shares of the adaptive ones."""


@dataclass(frozen=True)
class Spec:
    """One entry of `--layouts`.

    Attributes:
        name: as written, e.g. `auto:0.5`. kind: one of `KINDS`, or `bits`.
        value: the number after the colon.
    """

    name: str
    kind: str
    value: float | None = None

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Read one entry.

        Raises:
            InvalidRequest: names the entry and what is allowed.
        """
        text = text.strip()
        kind, _, number = text.partition(":")
        if text and set(text) <= set("01") and len(text) > 1:
            return cls(text, "bits")
        if kind not in KINDS:
            raise InvalidRequest(
                f"layout {text!r} is unknown; use one of {', '.join(KINDS)} (with :number where it has one), or one "
                "character of 0 and 1 per block",
                "layouts",
            )
        meaning = KINDS[kind]
        if meaning is None:
            if number:
                raise InvalidRequest(f"layout {text!r} has a number, {kind} takes none", "layouts")
            return cls(kind, kind)
        if not number and kind not in DEFAULTS:
            raise InvalidRequest(f"layout {text!r} needs a {meaning}, as in {kind}:0.5", "layouts")
        try:
            value = float(number) if number else DEFAULTS[kind]
        except ValueError:
            value = math.nan
        whole = meaning in ("count", "items")
        top = math.inf if whole or meaning == "blocks" else 1.0
        if not 0 <= value <= top or (whole and value != int(value)):
            allowed = "a whole number" if whole else "0…1" if top == 1.0 else "0…1 or a number of blocks"
            raise InvalidRequest(f"layout {text!r} has the {meaning} {number!r}; use {allowed}", "layouts")
        return cls(f"{kind}:{value:g}", kind, value)

    @property
    def slug(self) -> str:
        """Part of a file name."""
        return self.name.replace(":", "-")


def parse_specs(text: str) -> list[Spec]:
    """Entries of a comma-separated list, without repeats, in the order in which they can run.

    The base comes first, since agreement is measured against it; what is matched to the gates' spending comes after
    the gates.

    Raises:
        InvalidRequest: an unknown entry, or `shuffled` without the `auto` that it shuffles.
    """
    specs = list(dict.fromkeys(Spec.parse(part) for part in text.split(",") if part.strip()))
    if not specs:
        raise InvalidRequest("no layout is named; use for example attention,ssm,auto:0.5", "layouts")
    specs = [Spec("attention", "attention"), *(spec for spec in specs if spec.kind != "attention")]
    budgets = {spec.value for spec in specs if spec.kind == "auto"}
    for spec in specs:
        if spec.kind == "shuffled" and spec.value not in budgets:
            specs.append(Spec(f"auto:{spec.value:g}", "auto", spec.value))
            budgets.add(spec.value)
    order = ["attention", "ssm", "auto"]
    return sorted(specs, key=lambda spec: order.index(spec.kind) if spec.kind in order else len(order))


@dataclass(frozen=True)
class Requests:
    """What assigning layouts needs to know of a set's requests.

    Attributes:
        ids: of the items. lengths: prompt tokens.
        saved: c_l(n), seconds that the ssm saves, float32 `[requests, blocks]`.
    """

    ids: Sequence[str]
    lengths: Sequence[int]
    saved: torch.Tensor


def free_attention(config: ModelConfig, saved: torch.Tensor) -> torch.Tensor:
    """Where attention is taken by every layout but `ssm` and bits: bool `[requests, blocks]`."""
    adaptive = torch.tensor([kind == "adaptive" for kind in config.block_kinds])
    return (saved <= 0) & adaptive


def undecided(config: ModelConfig, saved: torch.Tensor) -> torch.Tensor:
    """Requests for which some block has a choice to make: bool `[requests]`."""
    adaptive = torch.tensor([kind == "adaptive" for kind in config.block_kinds])
    return ((saved > 0) & adaptive).any(1)


def with_static_blocks(config: ModelConfig, layouts: torch.Tensor) -> torch.Tensor:
    """Layouts bool `[..., blocks]` with the mixer that each static block has; a copy."""
    layouts = layouts.clone()
    for block, kind in enumerate(config.block_kinds):
        if kind != "adaptive":
            layouts[..., block] = kind == "attention"
    return layouts


def evenly_placed(blocks: int, count: int) -> torch.Tensor:
    """`count` attention blocks in the middles of equal stretches: bool `[blocks]`."""
    layout = torch.zeros(blocks, dtype=torch.bool)
    for i in range(count):
        layout[int((i + 0.5) * blocks / count)] = True
    return layout


def static_at_cost(
    config: ModelConfig, requests: Requests, ranking: Sequence[int], target: float, seed: int = 0
) -> torch.Tensor:
    """Nested static layouts that spend `target` (0…1, as budgets count) on these requests: bool `[requests, blocks]`.

    Between two counts of attention blocks, the requests are split between the two layouts, at random but for the sum.
    """
    order = [block for block in ranking if config.block_kinds[block] == "adaptive"]
    free = free_attention(config, requests.saved)
    chain = with_static_blocks(config, nested_layouts(ranking, [0] * (len(order) + 1)))
    for count in range(len(order) + 1):
        chain[count, order[:count]] = True
    choices = chain[:, None, :] | free[None]
    spent = [budget_of(layouts, requests.saved) for layouts in choices]
    upper = next((count for count, cost in enumerate(spent) if cost >= target - 1e-9), len(order))
    if upper == 0:
        return choices[0]
    # One request after the other goes from the lower to the upper layout, until the sum is met.
    rows = list(range(len(requests.ids)))
    random.Random(f"static:{seed}").shuffle(rows)
    mixed = choices[upper - 1].clone()
    best, gap = mixed.clone(), abs(spent[upper - 1] - target)
    for row in rows:
        mixed[row] = choices[upper][row]
        now = abs(budget_of(mixed, requests.saved) - target)
        if now > gap:
            break
        best, gap = mixed.clone(), now
    return best


def assign(
    spec: Spec,
    config: ModelConfig,
    requests: Requests,
    ranking: Sequence[int] | None,
    gated: dict[float, torch.Tensor],
    seed: int = 0,
) -> torch.Tensor | None:
    """Layouts of a set's requests: bool `[requests, blocks]`; None where the engine's gates choose.

    Args:
        ranking: blocks, most sensitive first; needed by `static` and `chain`.
        gated: layouts that `auto` chose on these requests, by budget. `static` spends what `auto` of its budget spent,
            or the budget itself where `auto` was not run.
    """
    blocks, count = config.num_blocks, len(requests.ids)
    free = free_attention(config, requests.saved)
    value = spec.value
    if spec.kind == "auto":
        return None
    if spec.kind == "bits":
        if len(spec.name) != blocks:
            raise InvalidRequest(f"layout {spec.name!r} has {len(spec.name)} blocks, the model has {blocks}", "layouts")
        return torch.tensor([bit == "1" for bit in spec.name]).expand(count, -1)
    if spec.kind in ("attention", "ssm"):
        whole = torch.full((count, blocks), spec.kind == "attention")
        return with_static_blocks(config, whole)
    assert spec.kind == "alternating" or value is not None
    if spec.kind == "shuffled":
        assert value is not None
        return shuffle_within_buckets(gated[value], requests.lengths, seed)
    if spec.kind == "static":
        assert value is not None
        if ranking is None:
            raise InvalidRequest("static layouts need a ranking of the blocks; see --ranking", "layouts")
        target = budget_of(gated[value], requests.saved) if value in gated else value
        return static_at_cost(config, requests, ranking, target, seed)
    if spec.kind == "chain":
        assert value is not None and ranking is not None
        layouts = nested_layouts(ranking, [int(min(value, blocks))]).expand(count, -1)
    elif spec.kind == "alternating":
        layouts = (torch.arange(blocks) % 2 == 0).expand(count, -1)
    elif spec.kind == "nemotron":
        assert value is not None
        number = round(value * blocks) if value < 1 else int(value)
        layouts = evenly_placed(blocks, min(max(number, 1), blocks)).expand(count, -1)
    else:
        assert spec.kind == "random" and value is not None
        rows = []
        for item in requests.ids:
            rng = random.Random(f"{seed}:{item}")
            chosen = rng.sample(range(blocks), round(value * blocks))
            rows.append([block in chosen for block in range(blocks)])
        layouts = torch.tensor(rows).view(count, blocks)
    return with_static_blocks(config, layouts | free)


def expand_oracle(specs: Sequence[Spec], config: ModelConfig) -> tuple[list[Spec], int]:
    """The layouts to run, with the static chain in place of `oracle`, and on how many items the oracle is asked."""
    found, items = [], 0
    adaptive = sum(kind == "adaptive" for kind in config.block_kinds)
    for spec in specs:
        if spec.kind != "oracle":
            found.append(spec)
            continue
        items = int(spec.value or 0)
        for share in CHAIN_SHARES:
            found.append(Spec(f"chain:{round(share * adaptive)}", "chain", round(share * adaptive)))
    return list(dict.fromkeys(found)), items


def params_of(spec: Spec, layout: torch.Tensor | None) -> SamplingParams:
    """The engine's parameters of one request under a spec, greedy."""
    if layout is None:
        return SamplingParams(layout="auto", attention_budget=spec.value)
    return SamplingParams(layout=str(Layout.from_bits(layout.tolist())))
