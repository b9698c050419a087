"""Memory of requests: what must be free before one may start, and what it gives back as its layout is decided."""

from __future__ import annotations

from collections.abc import Sequence

from morph.cache.context_cache import ContextCache
from morph.cache.eviction import GreedyDual
from morph.cache.placement import Tails, Trust, cuts
from morph.cache.snapshot import BlockData
from morph.cache.tree import common_tokens
from morph.cache.tuning import Tuner
from morph.config import ModelConfig
from morph.engine.checkpoints import Checkpoint
from morph.engine.request import Request
from morph.memory.pool import PoolExhausted
from morph.memory.tables import PageTables

MOST_FOLLOWERS = 256
"""Waiting requests that are looked at for a prefix in common."""
MOST_NAMESPACES = 1024
"""Namespaces whose traffic is remembered."""
WORTH_WAITING = 128
"""Tokens that waiting for another's prefill must save at least."""


class Admission:
    """Reserves, opens, grows and frees the units of requests.

    Before the layout is known, each undecided block is reserved at the larger of its two needs; each decision gives
    the difference back. So no allocation can fail during prefill.
    """

    def __init__(self, tables: PageTables, config: ModelConfig, cache: ContextCache | None = None) -> None:
        self.tables = tables
        self.pool = tables.pool
        self.kinds = config.block_kinds
        self.message_ends = frozenset(config.eos_token_ids)
        self.cache = cache
        self._tails: dict[str, Tails] = {}
        self.trust = Trust()
        self.tuner = self._tuner(cache)

    def _tuner(self, cache: ContextCache | None) -> Tuner | None:
        if cache is None or not isinstance(cache.evictor, GreedyDual) or not cache.most_units:
            return None
        layout, blocks = self.tables.layout, len(self.kinds)
        largest = blocks * (2 * layout.kv_heads * layout.max_pages + 8 * layout.state_units)
        # A sample's copy must hold some entries to say anything.
        entry = blocks * max(layout.state_units, layout.attention_units(1024))
        sample = 4 if cache.most_units >= 400 * entry else 1
        return Tuner(cache.evictor, cache.most_units, largest, layout, cache.cost, sample)

    def block_need(self, request: Request, block: int, tokens: int) -> int:
        """Units to reserve for one block of `tokens` tokens, beside the whole pages of a hit."""
        layout = self.tables.layout
        shared = request.hit.tokens // layout.page_tokens if request.hit is not None else 0
        attention, ssm = layout.attention_units(tokens) - layout.kv_heads * shared, layout.state_units
        if block < len(request.bits):
            return attention if request.bits[block] else ssm
        if request.fixed is not None:
            return attention if request.fixed[block] else ssm
        kind = self.kinds[block]
        return attention if kind == "attention" else ssm if kind == "ssm" else max(attention, ssm)

    def need(self, request: Request, tokens: int) -> int:
        """Units to reserve for the whole request of `tokens` tokens."""
        return sum(self.block_need(request, block, tokens) for block in range(len(self.kinds)))

    def fits_ever(self, request: Request) -> bool:
        """True when the request alone fits the pool at its full length."""
        last = request.prompt_len + request.max_tokens
        return max(self.need(request, request.prompt_len), self.need(request, last)) <= self.pool.num_units

    def admit(self, request: Request, headroom: int) -> bool:
        """Give the request a slot and reserve its prefill's units, if `headroom` units stay available beside them."""
        need = self.need(request, request.num_tokens)
        if not self.tables.free_slots or not self._room(need + headroom):
            return False
        self.pool.reserve(need)
        slot = self.tables.acquire()
        assert slot is not None
        request.slot, request.reserved = slot, need
        return True

    def _room(self, units: int) -> bool:
        """True when so many units are available, after evicting what must go for them."""
        if self.cache is not None:
            return self.cache.make_room(units)
        return units <= self.pool.available_units

    # ---- the context cache

    def look_up(self, request: Request) -> None:
        """Find where the prompt can start from; the request holds that position until `leave_hit`."""
        if self.cache is None:
            return
        known = request.bits if request.fixed is None else list(request.fixed)
        limit = last_usable(request)
        if len(known) < len(self.kinds):
            limit = min(limit, request.gate_tokens - 1)
        request.follows_gates = False
        request.hit = self.cache.find(
            request.namespace, request.path(), limit, known, len(self.kinds), gates=len(known) < len(self.kinds)
        )
        if request.hit is not None and len(known) < len(self.kinds) and request.params.cache_affinity == 0:
            request.follows_gates = True
            if not self.trust.worth(request.hit.tokens, request.num_tokens):
                self.leave_hit(request)
        request.cached = request.hit.tokens if request.hit is not None else 0

    def leave_hit(self, request: Request) -> None:
        """The request reads no more from where it started."""
        if request.hit is not None and self.cache is not None:
            self.cache.leave(request.namespace, request.hit)
            request.hit = None

    def strayed(self, request: Request) -> None:
        """The gates chose what nobody stored: what the request computed of its prompt so far is lost."""
        if request.follows_gates:
            self.trust.strayed(len(request.bits) / len(self.kinds))

    def plan_checkpoints(self, request: Request, waiting: Sequence[Request] = ()) -> None:
        """Choose what the admitted request's prefill leaves behind.

        Args:
            waiting: others in the queue. Those that share enough with the request wait for it from now on.
        """
        request.sums_known = True
        if not request.preemptions:
            request.skipped = request.cached
        if self.cache is None:
            return
        parting = request.hit.matched if request.hit is not None else 0
        if request.hit is None:
            parting = self.cache.matched(request.namespace, request.path())
        tails = self.tails_of(request.namespace)
        expected = tails.place(request.num_tokens)
        if not request.preemptions:
            tails.saw(request.num_tokens, parting if parting >= self.cache.least_tokens else 0)
        parting = self._lead(request, waiting) or parting
        fixed = request.layout(len(self.kinds))
        # Keys and values can be cut back to any shorter prefix: without states nothing needs checkpoints in between.
        most = 1 if fixed is not None and all(fixed) else 4
        places = cuts(request.tokens, request.cached, last_usable(request), self.message_ends, parting, expected, most)
        request.checkpoints = [Checkpoint(place) for place in places if place >= self.cache.least_tokens]

    def tails_of(self, namespace: str) -> Tails:
        """What the namespace's traffic taught about where prompts part."""
        tails = self._tails.setdefault(namespace, Tails())
        if len(self._tails) > MOST_NAMESPACES:
            self._tails.pop(next(iter(self._tails)))
        return tails

    def _lead(self, request: Request, waiting: Sequence[Request]) -> int:
        """Let others that begin alike wait for what this prefill computes; returns where they part, 0 for none.

        Of all places where somebody parts, the one that saves the most tokens is taken.
        """
        shared = []
        for other in waiting[:MOST_FOLLOWERS]:
            if other.leader is None and _same_choice(request, other):
                tokens = min(common_tokens(request.path(), other.path()), last_usable(other))
                if tokens >= request.cached + WORTH_WAITING:
                    shared.append((tokens, other))
        if not shared:
            return 0
        shared.sort(key=lambda entry: entry[0])
        gains = [(tokens - request.cached) * (len(shared) - i) for i, (tokens, _) in enumerate(shared)]
        place = shared[gains.index(max(gains))][0]
        for tokens, other in shared:
            if tokens >= place:
                other.leader = request
        return place

    def open_checkpoints(self, request: Request, block: int) -> None:
        """Memory for what the block leaves behind; a checkpoint that finds none is given up."""
        layout, attention = self.tables.layout, request.bits[block]
        for checkpoint in list(request.checkpoints):
            sums, checkpoint.sums = checkpoint.sums, None
            if attention:
                held = self.tables.units(request.slot, block).reshape(layout.kv_heads, -1)
                units = held[:, : layout.pages(checkpoint.tokens)].copy()
                self.pool.retain(units.ravel())
            elif self._room(layout.state_units):
                units = self.pool.alloc(layout.state_units)
            else:
                self._give_up(request, checkpoint)
                continue
            checkpoint.blocks.append(BlockData(attention, units, sums=sums))

    def _give_up(self, request: Request, checkpoint: Checkpoint) -> None:
        assert self.cache is not None
        request.checkpoints.remove(checkpoint)
        self.cache.discard(checkpoint.blocks)

    def publish(self, request: Request) -> None:
        """The prefill is through: what it left behind can be used, and the place that it started from is left."""
        if self.cache is None:
            return
        counts = self.cache.counts
        counts.prompt_tokens += request.num_tokens
        counts.hit_tokens += request.cached
        counts.kinds["hit" if request.cached else "miss"] += 1
        if request.hit is not None:
            self.cache.used(request.hit, request.bits)
            if request.follows_gates:
                self.trust.followed()
        self.leave_hit(request)
        if self.tuner is not None:
            places = [checkpoint.tokens for checkpoint in request.checkpoints]
            self.tuner.saw(request.namespace, request.path(), request.bits, places, last_usable(request))
        for checkpoint in request.checkpoints:
            self.cache.publish(request.namespace, request.path(checkpoint.tokens), request.bits, checkpoint.blocks)
        request.checkpoints = []

    def donate(self, request: Request, blocks: list[BlockData]) -> None:
        """A finished answer's memory goes to the cache as it is; `blocks` lacks the units, which the slot has."""
        assert self.cache is not None
        layout = self.tables.layout
        for block, data in enumerate(blocks):
            units = self.tables.units(request.slot, block)
            if data.attention:
                units = units.reshape(layout.kv_heads, -1)[:, : layout.pages(request.cached)].copy()
            self.pool.retain(units.ravel())
            data.units = units
        self.cache.publish(request.namespace, request.path(request.cached), request.bits, blocks)

    def open_block(self, request: Request, block: int, attention: bool) -> None:
        """Turn the block's reservation into memory for the chosen path; the rest goes back."""
        promised = self.block_need(request, block, request.num_tokens)
        free_before = self.pool.free_units
        if attention:
            shared = None
            if request.hit is not None and (data := request.hit.block(request.bits[: block + 1])) is not None:
                shared = data.units[:, : request.hit.tokens // self.tables.layout.page_tokens]
            self.tables.open_attention(request.slot, block, request.num_tokens, reserved=True, shared=shared)
        else:
            self.tables.open_ssm(request.slot, block, reserved=True)
        self.pool.unreserve(promised - (free_before - self.pool.free_units))
        request.reserved -= promised

    def grow(self, request: Request) -> bool:
        """Room for one more token; False, and nothing changes, when the pool has too little."""
        try:
            self.tables.grow(request.slot, request.cached + 1)
        except PoolExhausted:
            if not self._room(self.tables.growth(request.slot, request.cached + 1)):
                return False
            self.tables.grow(request.slot, request.cached + 1)
        return True

    def page_of_all(self, requests: list[Request]) -> int:
        """Units that one more page for each of the requests would take."""
        heads = self.tables.layout.kv_heads
        return sum(heads * sum(request.bits) for request in requests)

    def release(self, request: Request) -> None:
        """Free all memory and promises of the request."""
        self.leave_hit(request)
        if self.cache is not None:
            for checkpoint in request.checkpoints:
                self.cache.discard(checkpoint.blocks)
        request.checkpoints = []
        if request.slot < 0:
            request.cached = 0
            return
        self.tables.release(request.slot)
        self.pool.unreserve(request.reserved)
        request.slot, request.reserved, request.cached = -1, 0, 0


def _same_choice(one: Request, other: Request) -> bool:
    """True when two requests that see the same tokens run the same layout over them."""
    return one.namespace == other.namespace and one.fixed == other.fixed and one.budget == other.budget


def last_usable(request: Request) -> int:
    """The longest prefix that a hit can serve: the rows from there on give the logits that are asked for."""
    if request.params.prompt_logprobs is not None and request.prompt_logprobs is None:
        return request.score_from or 0
    return request.num_tokens - 1
