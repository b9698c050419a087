"""Memory of requests: what must be free before one may start, and what it gives back as its layout is decided."""

from __future__ import annotations

from morph.config import ModelConfig
from morph.engine.request import Request
from morph.memory.pool import PoolExhausted
from morph.memory.tables import PageTables


class Admission:
    """Reserves, opens, grows and frees the units of requests.

    Before the layout is known, each undecided block is reserved at the larger of its two needs; each decision gives
    the difference back. So no allocation can fail during prefill.
    """

    def __init__(self, tables: PageTables, config: ModelConfig) -> None:
        self.tables = tables
        self.pool = tables.pool
        self.kinds = config.block_kinds

    def block_need(self, request: Request, block: int, tokens: int) -> int:
        """Units to reserve for one block of `tokens` tokens."""
        attention, ssm = self.tables.layout.attention_units(tokens), self.tables.layout.state_units
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
        if not self.tables.free_slots or need + headroom > self.pool.available_units:
            return False
        self.pool.reserve(need)
        slot = self.tables.acquire()
        assert slot is not None
        request.slot, request.reserved = slot, need
        return True

    def open_block(self, request: Request, block: int, attention: bool) -> None:
        """Turn the block's reservation into memory for the chosen path; the rest goes back."""
        promised = self.block_need(request, block, request.num_tokens)
        free_before = self.pool.free_units
        if attention:
            self.tables.open_attention(request.slot, block, request.num_tokens, reserved=True)
        else:
            self.tables.open_ssm(request.slot, block, reserved=True)
        self.pool.unreserve(promised - (free_before - self.pool.free_units))
        request.reserved -= promised

    def grow(self, request: Request) -> bool:
        """Room for one more token; False, and nothing changes, when the pool has too little."""
        try:
            self.tables.grow(request.slot, request.cached + 1)
        except PoolExhausted:
            return False
        return True

    def page_of_all(self, requests: list[Request]) -> int:
        """Units that one more page for each of the requests would take."""
        heads = self.tables.layout.kv_heads
        return sum(heads * sum(request.bits) for request in requests)

    def release(self, request: Request) -> None:
        """Free all memory and promises of the request."""
        if request.slot < 0:
            return
        self.tables.release(request.slot)
        self.pool.unreserve(request.reserved)
        request.slot, request.reserved, request.cached = -1, 0, 0
