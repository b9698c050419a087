"""Gate policies: from what a gate sees of a prompt to the choice of a mixer, block after block.

A policy is a causal deterministic function: a decision depends on the block's features, the prompt length and the
carry of earlier decisions, never on the request's company. So layouts are reproducible and cacheable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from morph.config import ModelConfig
from morph.errors import CorruptFile, InvalidRequest, UnsupportedModel
from morph.gate.cost import CostTable
from morph.kernels.gate import GateFunction, native_gate
from morph.layout import Layout


class Decision(NamedTuple):
    """One block's choice; `carry` goes on.

    `utility` is û, nats of KL per answer token lost by running the ssm, or 0 where attention is the cheaper one: then
    nothing has to be predicted.
    """

    attention: bool
    utility: float
    carry: Any


class GatePolicy(Protocol):
    """What the engine asks in each adaptive block, in block order, inside prefill."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        ...

    def initial_carry(self) -> Any:
        """Carry of the first decision."""
        ...

    def decide(self, block: int, sums: torch.Tensor, last: torch.Tensor, n: int, carry: Any) -> Decision:
        """Choose the mixer of one block for one request.

        Args:
            sums: float64 `[hidden]`, sum of the block's normed inputs over all prompt tokens; not changed.
            last: float32 `[hidden]`, normed input of the last prompt token.
            n: prompt tokens.
            carry: what the decision of the block before returned.
        """
        ...


class GateSource(Protocol):
    """Where gates come from: an opened model folder."""

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        ...

    @property
    def meta(self) -> Mapping[str, Any]:
        """The folder's config.json."""
        ...

    @property
    def tokenizer_dir(self) -> Path:
        """The folder itself."""
        ...

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor of that name."""
        ...

    def has(self, name: str) -> bool:
        """True when the model has a tensor of that name."""
        ...


def features(sums: torch.Tensor, last: torch.Tensor, n: int) -> torch.Tensor:
    """What a gate sees: mean normed input, last normed input, log of the prompt length.

    Args:
        sums: float64 `[hidden]`. last: float32 `[hidden]`. n: prompt tokens.

    Returns:
        float32 `[2 * hidden + 1]`.
    """
    mean = (sums / n).float()
    return torch.cat([mean, last.float(), mean.new_tensor([math.log(n)])])


@dataclass(frozen=True)
class GateWeights:
    """One block's gate, float32: Linear(2d+1, width)-GELU-Linear(width, 1)."""

    fc1: torch.Tensor
    bias1: torch.Tensor
    fc2: torch.Tensor
    bias2: float

    def utility(self, feature: torch.Tensor) -> float:
        """û of one request; a fixed-shape product, so it does not depend on the request's company."""
        hidden = torch.nn.functional.gelu(torch.addmv(self.bias1, self.fc1, feature))
        return float(torch.dot(self.fc2, hidden)) + self.bias2

    @cached_property
    def predict(self) -> GateFunction:
        """û from running sums, last input and prompt tokens: natively where that is there, else `utility`."""
        native = native_gate(self.fc1, self.bias1, self.fc2, self.bias2)
        return native or (lambda sums, last, n: self.utility(features(sums, last, n)))

    @classmethod
    def read(cls, source: GateSource, block: int) -> GateWeights:
        """Load `blocks.{block}.gate.*`.

        Raises:
            CorruptFile: a tensor is missing or has another shape.
        """
        name = f"blocks.{block}.gate."
        for part in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
            if not source.has(name + part):
                raise CorruptFile(
                    f"model has no tensor {name + part!r}; restore gate.safetensors or fit the gates again "
                    "with `morph gate fit`"
                )
        fc1, bias1, fc2, bias2 = (
            source.get(name + part, torch.float32).contiguous()
            for part in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
        )
        width, inputs = bias1.shape[0], 2 * source.config.hidden_size + 1
        if fc1.shape != (width, inputs) or fc2.shape != (1, width) or bias2.shape != (1,):
            raise CorruptFile(
                f"gate of block {block} has shapes {tuple(fc1.shape)}, {tuple(fc2.shape)}, {tuple(bias2.shape)}; "
                f"want ({width}, {inputs}), (1, {width}), (1,)"
            )
        return cls(fc1, bias1, fc2[0], float(bias2[0]))


class UtilityPolicy:
    """Attention where the predicted loss of the ssm exceeds τ times the seconds that the ssm saves.

    Where the ssm saves nothing (c <= 0, short prompts), attention is cheaper and better: it is taken at every τ.
    τ = inf is therefore exactly the cheapest choice in every block, and τ = -inf exactly all-attention.

    Args:
        gates: one per block, None in a static block.
        cost: the model's cost table. tau: nats per second.
    """

    def __init__(self, gates: Sequence[GateWeights | None], cost: CostTable, tau: float) -> None:
        if len(gates) != cost.num_blocks:
            raise CorruptFile(f"{len(gates)} gates and a cost table of {cost.num_blocks} blocks; want as many of each")
        if math.isnan(tau):
            raise InvalidRequest("tau is NaN; calibrate the gates again with `morph calibrate`")
        self.gates, self.cost, self.tau = list(gates), cost, tau

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return len(self.gates)

    def initial_carry(self) -> tuple[()]:
        """Decisions are independent given the features: nothing is carried."""
        return ()

    def decide(self, block: int, sums: torch.Tensor, last: torch.Tensor, n: int, carry: Any = None) -> Decision:
        """See `GatePolicy.decide`."""
        gate = self.gates[block]
        if gate is None:
            raise InvalidRequest(f"block {block} is static; its mixer is not a choice")
        if not self.asks(block, n):
            return Decision(True, 0.0, carry)
        return self.decided(block, gate.predict(sums, last, n), n, carry)

    def asks(self, block: int, n: int) -> bool:
        """True where the decision of an adaptive block depends on û: for `n` tokens the ssm saves time."""
        return self.gates[block] is not None and self.cost.saved_seconds(block, n) > 0

    def regret(self, block: int, utility: float, n: int) -> float:
        """Nats lost, time weighed in, by the mixer that the rule rejects; infinite where û was not predicted."""
        if not self.asks(block, n) or not math.isfinite(self.tau):
            return math.inf
        return abs(utility - self.tau * self.cost.saved_seconds(block, n))

    def decided(self, block: int, utility: float, n: int, carry: Any = None) -> Decision:
        """The decision, given û (predicted elsewhere)."""
        return Decision(self.attention(block, utility, n), utility, carry)

    def attention(self, block: int, utility: float, n: int) -> bool:
        """The rule, given û."""
        saved = self.cost.saved_seconds(block, n)
        if saved <= 0 or self.tau == -math.inf:
            return True
        return self.tau != math.inf and utility > self.tau * saved

    def decide_many(
        self,
        block: int,
        sums: torch.Tensor,
        last: torch.Tensor,
        lengths: Sequence[int],
        carries: Sequence[Any],
    ) -> list[Decision]:
        """`decide` for several requests at one block: row i of `sums` and `last` `[requests, hidden]` is request i.

        Rows are evaluated one by one: a batched product would round differently with the number of rows.
        """
        return [
            self.decide(block, sums[row], last[row], n, carries[row]) for row, n in enumerate(lengths)
        ]  # fmt: skip


@dataclass(frozen=True)
class StaticPolicy:
    """The same layout for every request."""

    layout: Layout

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return len(self.layout)

    def initial_carry(self) -> tuple[()]:
        """Nothing is carried."""
        return ()

    def decide(self, block: int, sums: torch.Tensor, last: torch.Tensor, n: int, carry: Any = None) -> Decision:
        """See `GatePolicy.decide`; û is 0, nothing is predicted."""
        return Decision(self.layout[block], 0.0, carry)


@dataclass(frozen=True)
class RandomPolicy:
    """Attention with a fixed chance per block, drawn from the features: the same prompt gets the same layout.

    A baseline that keeps the gates' mean count and nothing else.
    """

    blocks: int
    share: float
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return self.blocks

    def initial_carry(self) -> int | None:
        """The prompt's key, which the first decision sets."""
        return None

    def decide(self, block: int, sums: torch.Tensor, last: torch.Tensor, n: int, carry: Any = None) -> Decision:
        """See `GatePolicy.decide`. The carry is the prompt's own key, taken in the first block."""
        key = carry if carry is not None else (hash((n, round(float(sums.sum()), 3))) & 0x7FFFFFFF)
        generator = torch.Generator().manual_seed((key * 1000003 + block * 7919 + self.seed) & 0x7FFFFFFFFFFFFFFF)
        draw = float(torch.rand((), generator=generator, dtype=torch.float64))
        return Decision(draw < self.share, 0.0, key)


class Gates:
    """The gates of a model, read once, and the policies made of them.

    Args:
        weights: one per block, None in a static block.
        budgets: calibrated budgets, ascending from 0 to 1. tau: τ of each, not ascending.
    """

    def __init__(
        self,
        weights: Sequence[GateWeights | None],
        cost: CostTable,
        budgets: Sequence[float],
        tau: Sequence[float],
    ) -> None:
        ascending = all(a < b for a, b in itertools.pairwise(budgets))
        if len(budgets) < 2 or not ascending or budgets[0] != 0.0 or budgets[-1] != 1.0:
            raise CorruptFile(f"gate budgets are {list(budgets)}; want ascending values from 0 to 1")
        falling = all(a >= b for a, b in itertools.pairwise(tau))
        if len(tau) != len(budgets) or not falling or not all(math.isfinite(t) for t in tau):
            raise CorruptFile(f"gate tau is {list(tau)}; want {len(budgets)} finite values, none above the one before")
        self.weights, self.cost, self.budgets, self.tau = list(weights), cost, list(budgets), list(tau)

    @classmethod
    def load(cls, source: GateSource) -> Gates:
        """Read the gates of an opened model folder.

        Raises:
            UnsupportedModel: the model has no gates, or a policy that this Morph does not know.
            CorruptFile: a part of them is missing or does not fit the model.
        """
        meta = source.meta.get("gate")
        if not meta:
            raise UnsupportedModel("model has no gates; name a layout, or fit gates with `morph gate fit`")
        if meta.get("policy") != "utility":
            raise UnsupportedModel(f"gate policy {meta.get('policy')!r} is unknown, want 'utility'; update Morph")
        for key in ("budgets", "tau", "cost_table"):
            if key not in meta:
                raise CorruptFile(
                    f"config.json has no gate.{key}; restore it or fit the gates again with `morph gate fit`"
                )
        cost = CostTable.load(source.tokenizer_dir / str(meta["cost_table"]))
        config = source.config
        if cost.num_blocks != config.num_blocks:
            raise CorruptFile(f"cost table has {cost.num_blocks} blocks, the model has {config.num_blocks}")
        weights = [
            GateWeights.read(source, block) if kind == "adaptive" else None
            for block, kind in enumerate(config.block_kinds)
        ]
        return cls(weights, cost, [float(b) for b in meta["budgets"]], [float(t) for t in meta["tau"]])

    def tau_of(self, budget: float) -> float:
        """τ of a budget: linear between calibrated budgets; inf at 0 and -inf at 1, which are exact.

        Raises:
            InvalidRequest: budget outside 0…1.
        """
        if not 0.0 <= budget <= 1.0:
            raise InvalidRequest(f"attention_budget is {budget!r}; use 0…1", "attention_budget")
        if budget == 0.0:
            return math.inf
        if budget == 1.0:
            return -math.inf
        at = max(i for i, b in enumerate(self.budgets) if b <= budget)
        low, high = self.budgets[at], self.budgets[at + 1]
        share = (budget - low) / (high - low)
        return self.tau[at] + share * (self.tau[at + 1] - self.tau[at])

    def policy(self, budget: float) -> UtilityPolicy:
        """Policy of one budget; the weights are shared."""
        return UtilityPolicy(self.weights, self.cost, self.tau_of(budget))


def load_policy(source: GateSource, budget: float) -> UtilityPolicy:
    """Policy of a model folder at a budget 0…1. Use `Gates.load` once and `.policy` for several budgets."""
    return Gates.load(source).policy(budget)
