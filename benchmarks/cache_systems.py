"""Caches that `benchmarks/cache_replay.py` compares, driven without a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.cache_traffic import Turn
from morph.cache.context_cache import ContextCache, no_units
from morph.cache.cost import PrefillCost
from morph.cache.eviction import Evictor
from morph.cache.placement import Tails
from morph.cache.snapshot import BlockData
from morph.config import ModelConfig
from morph.engine.admission import Admission
from morph.engine.params import SamplingParams
from morph.engine.request import Request
from morph.memory.pool import UnitPool
from morph.memory.tables import PageTables, UnitLayout

FLAT = torch.zeros(1, dtype=torch.float64)
"""Stands for gate sums and conv tails, which a replay has no use for."""


@dataclass
class Tally:
    """What a system saved over a run.

    Attributes:
        prompt, hit: tokens. flops, saved: of prefill without a cache, and what hits saved of it, restarts paid.
        adopted: requests that ran another layout than their gates chose; regret: nats that it cost, summed.
    """

    prompt: int = 0
    hit: int = 0
    flops: float = 0.0
    saved: float = 0.0
    restarts: int = 0
    adopted: int = 0
    regret: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed."""
        return self.hit / max(1, self.prompt)

    @property
    def saved_share(self) -> float:
        """Share of prefill FLOPs that were not computed."""
        return self.saved / max(1.0, self.flops)


class NoTails(Tails):
    """Learns nothing: checkpoints only at ends and where prompts were seen to part."""

    def place(self, tokens: int) -> int:
        """See `Tails.place`."""
        return 0


class MorphCache:
    """The engine's own tree, pool, tables, admission and policies; only the numbers in memory are missing.

    Args:
        units: what the cache may hold. One running request has room beside it.
        learn: place checkpoints by learnt tails and at message ends; off = prompt end, answer end and junctions.
        affinity: as in `SamplingParams.cache_affinity`, 0 or `auto`.
        flops_per_second: of the cost table, for `auto`.
    """

    def __init__(
        self,
        config: ModelConfig,
        units: int,
        evictor: Evictor,
        context: int,
        learn: bool = True,
        affinity: str | float = 0,
        flops_per_second: float = 4e11,
    ) -> None:
        self.config, self.affinity, self.rate = config, affinity, flops_per_second
        layout = UnitLayout.of(config, torch.bfloat16, context)
        largest = config.num_blocks * (2 * layout.attention_units(context) + 6 * layout.state_units)
        self.pool = UnitPool(units + largest, layout.unit_bytes, "meta")
        self.tables = PageTables(self.pool, layout, config, slots=1)
        self.cost = PrefillCost(config)
        self.cache = ContextCache(
            self.pool, self.cost, units, evictor=evictor, most_aside=1 << 60, clock=lambda: self.now
        )
        self.admission = Admission(self.tables, config, self.cache)
        if not learn:
            self.admission.message_ends = frozenset()
            self.admission.tails_of = lambda namespace: NoTails()  # type: ignore[method-assign]
        self.now = self._wasted = 0.0
        self.tally = Tally()

    def serve(self, turn: Turn) -> None:
        """One request from lookup to the end of its answer."""
        self.now += 1
        tally, blocks = self.tally, self.config.num_blocks
        request = _request(turn)
        while not self._prefill(request, turn):
            tally.restarts += 1
            # The rows were computed up to the block at which they proved useless.
            tally.saved -= len(request.bits) / blocks * self._wasted
        tally.prompt += len(turn.prompt)
        tally.hit += request.skipped
        tally.flops += self._flops(request, len(turn.prompt))
        tally.saved += self._flops(request, request.skipped)
        if request.layout_source == "cache":
            tally.adopted += 1
            tally.regret += request.regret
        self.admission.publish(request)
        request.tokens += turn.answer
        request.cached = len(turn.prompt)
        page = self.tables.layout.page_tokens
        while request.cached < request.num_tokens - 1:
            assert self.admission.grow(request)
            request.cached = min(request.num_tokens - 1, (request.cached // page + 1) * page)
        assert self.admission.grow(request)
        left = [BlockData(bit, no_units(), None if bit else FLAT, FLAT) for bit in request.bits]
        self.admission.donate(request, left)
        self.admission.release(request)

    def _flops(self, request: Request, tokens: int) -> float:
        return self.cost.flops(sum(request.bits), tokens) if tokens else 0.0

    def _prefill(self, request: Request, turn: Turn) -> bool:
        """False when the gates chose what nobody stored: the request then starts again with the bits that it has."""
        admission = self.admission
        admission.look_up(request)
        assert admission.admit(request, 0), "one request always fits beside the cache"
        admission.plan_checkpoints(request)
        for block in range(self.config.num_blocks):
            if len(request.bits) == block:
                request.bits.append(turn.bits[block])
            if (
                request.hit is not None
                and request.hit.block(request.bits) is None
                and not self._adopt(request, turn, block)
            ):
                count = sum(turn.bits)
                self._wasted = self.cost.flops(count, len(turn.prompt)) - self.cost.flops(count, request.cached)
                admission.strayed(request)
                admission.release(request)
                return False
            admission.open_block(request, block, request.bits[block])
            for checkpoint in request.checkpoints:
                checkpoint.sums = FLAT
            admission.open_checkpoints(request, block)
            for checkpoint in request.checkpoints:
                if not request.bits[block]:
                    checkpoint.blocks[-1].tail = FLAT
        return True

    def _adopt(self, request: Request, turn: Turn, block: int) -> bool:
        if self.affinity == 0 or request.hit is None or len(request.bits) != block + 1:
            return False
        own = list(request.bits)
        regret = request.regret + float(turn.regret[block])
        tolerance = (
            float(self.affinity)
            if self.affinity != "auto"
            else (turn.tau * self.cost.flops(sum(own), request.hit.tokens) / self.rate)
        )
        if request.hit.block([*own[:-1], not own[-1]]) is not None and regret <= tolerance and np.isfinite(regret):
            request.gate_bits = request.gate_bits or own
            request.bits[-1], request.regret, request.layout_source = not own[-1], regret, "cache"
            return True
        if request.gate_bits is not None:
            request.bits, request.gate_bits = request.gate_bits, None
            request.regret, request.layout_source = 0.0, "gate"
        return False


class Conventional:
    """A prefix cache that is not made for hybrids.

    Blocks of one size whose pages hold the keys and values of all layers, whichever mixer ran, and the states of the
    ssm layers at each block's end; equal layouts only; LRU, leaves first.

    A block is as many tokens as make the page of an attention layer as large as the state of an ssm layer, as engines
    with one page size choose it. The layout is given to the lookup, which in truth would have to guess it.
    """

    def __init__(self, config: ModelConfig, units: int) -> None:
        layout = UnitLayout.of(config, torch.bfloat16, 1 << 17)
        pages = max(1, -(-layout.state_units // layout.kv_heads))
        self.block = pages * layout.page_tokens
        self.size = {
            count: config.num_blocks * layout.kv_heads * pages + (config.num_blocks - count) * layout.state_units
            for count in range(config.num_blocks + 1)
        }
        self.cost = PrefillCost(config)
        self.units, self.held = units, 0
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self.tally = Tally()

    def serve(self, turn: Turn) -> None:
        """One request."""
        keys = self._keys(turn.prompt + turn.answer[:-1], turn.bits)
        most = (len(turn.prompt) - 1) // self.block
        hit = 0
        while hit < min(most, len(keys)) and keys[hit] in self._blocks:
            hit += 1
        count, tally = sum(turn.bits), self.tally
        tally.prompt += len(turn.prompt)
        tally.hit += hit * self.block
        tally.flops += self.cost.flops(count, len(turn.prompt))
        tally.saved += self.cost.flops(count, hit * self.block) if hit else 0.0
        for key in reversed(keys):
            if key not in self._blocks:
                self.held += self.size[count]
            self._blocks[key] = self.size[count]
            self._blocks.move_to_end(key)
        while self.held > self.units:
            self.held -= self._blocks.popitem(last=False)[1]

    def _keys(self, tokens: Sequence[int], bits: tuple[bool, ...]) -> list[int]:
        array, keys, key = np.array(tokens, np.int32), [], hash(bits)
        for at in range(0, len(tokens) - self.block + 1, self.block):
            key = hash((key, array[at : at + self.block].tobytes()))
            keys.append(key)
        return keys


def best_possible(config: ModelConfig, turns: Sequence[Turn], units: int) -> float:
    """No cache of so many units, however much it knows of the future, has a higher token hit rate (exact layouts).

    A hit needs the prefix in memory since it was last computed or used. Each page of 64 tokens takes its units, and its
    share of the states, for that time; pages are filled in by tokens per unit and time into the whole of memory and
    time (after PFOO; Berger, Beckmann, Harchol-Balter 2018). Ignored, in favour of the bound: that a page cannot be
    kept in part, and that memory cannot be moved in time.
    """
    layout = UnitLayout.of(config, torch.bfloat16, 1 << 17)
    page, last = layout.page_tokens, dict[int, int]()
    values, costs, prompt = [], [], 0
    for now, turn in enumerate(turns):
        count = sum(turn.bits)
        tokens = np.array(turn.prompt + turn.answer, np.int32)
        prompt += len(turn.prompt)
        key, found, intervals = hash(turn.bits), True, []
        for at in range(0, len(tokens), page):
            key = hash((key, tokens[at : at + page].tobytes()))
            if found and key in last and at < len(turn.prompt) - 1:
                intervals.append(now - last[key])
            else:
                found = False
            last[key] = now
        kv, states = layout.kv_heads * count, layout.state_units * (config.num_blocks - count)
        for interval in intervals:
            values.append(page)
            costs.append(interval * (kv + states / len(intervals)))
        if intervals:
            # The page that is shared in part.
            values.append(page - 1)
            costs.append(1e-9)
    if not values:
        return 0.0
    value, cost = np.array(values, float), np.array(costs, float)
    order = np.argsort(cost / value)
    spent = np.cumsum(cost[order])
    share = np.clip((units * len(turns) - (spent - cost[order])) / np.maximum(cost[order], 1e-12), 0, 1)
    return float(min(1.0, (value[order] * share).sum() / prompt))


def _request(turn: Turn) -> Request:
    return Request(
        id="replayed",
        tokens=list(turn.prompt),
        prompt_len=len(turn.prompt),
        params=SamplingParams(max_tokens=max(1, len(turn.answer))),
        order=0,
        seed=0,
        max_tokens=len(turn.answer),
        detokenizer=None,  # type: ignore[arg-type]
        gate_tokens=len(turn.prompt),
        layout_source="gate",
    )
