"""Page tables: which units hold what, per (request slot, block).

KV belongs to a (request, block): a block that runs attention for a request has pages and no state, a block that
runs ssm has states (and a window ring) and no pages. Both are rows of one int32 table that kernels read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from morph.config import ModelConfig
from morph.kernels.interface import page_tokens
from morph.memory.pool import SINK, UnitPool, Units


@dataclass(frozen=True)
class UnitLayout:
    """How one block's needs are cut into units.

    Attributes:
        unit_bytes: head_dim² × 4.
        page_tokens: tokens of one kv head's keys and values in one unit.
        max_pages: pages of one kv head at the longest context.
        ring_pages: pages of one kv head for the attention window inside the ssm mixer.
        width: entries of one table row.
    """

    kv_heads: int
    state_heads: int
    unit_bytes: int
    page_tokens: int
    max_pages: int
    ring_pages: int

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, max_context: int) -> UnitLayout:
        """Layout for a model with keys and values of `dtype`."""
        tokens = page_tokens(config.head_dim, dtype)
        window = config.ssm.window if config.ssm else 0
        return cls(
            kv_heads=config.num_kv_heads,
            state_heads=config.num_state_heads,
            unit_bytes=config.head_dim * config.head_dim * 4,
            page_tokens=tokens,
            max_pages=-(-max_context // tokens),
            ring_pages=-(-window // tokens),
        )

    @property
    def width(self) -> int:
        """Entries of one table row."""
        return max(self.kv_heads * self.max_pages, self.state_units)

    def pages(self, tokens: int) -> int:
        """Pages of one kv head that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def attention_units(self, tokens: int) -> int:
        """Units that attention over `tokens` tokens needs in one block."""
        return self.kv_heads * self.pages(tokens)

    @property
    def state_units(self) -> int:
        """Units that ssm needs in one block, whatever the length."""
        return self.state_heads + self.kv_heads * self.ring_pages


class PageTables:
    """Slots of running requests and what each block of each of them holds.

    Attributes:
        table: int32 `[slots, blocks, width]`. Attention rows: kv head h, page p at `h * max_pages + p`. Ssm rows:
            state units, then ring units `[kv_heads, ring_pages]`. Unused entries point at the sink.
        conv_tails: float32 `[slots, blocks, conv_width - 1, qkv]`, beside the pool because it is small.
    """

    def __init__(
        self, pool: UnitPool, layout: UnitLayout, config: ModelConfig, slots: int, device: torch.device | str = "cpu"
    ) -> None:
        self.pool = pool
        self.layout = layout
        self.num_blocks = config.num_blocks
        self.table = torch.full((slots, config.num_blocks, layout.width), SINK, dtype=torch.int32, device=device)
        taps = config.ssm.conv_width - 1 if config.ssm else 0
        self.conv_tails = torch.zeros((slots, config.num_blocks, taps, config.qkv_size), device=device)
        self._host: npt.NDArray[np.int32] = (
            self.table.numpy() if self.table.device.type == "cpu" else self.table.cpu().numpy()
        )
        self._free_slots = list(range(slots - 1, -1, -1))
        self._tokens = np.zeros((slots, config.num_blocks), dtype=np.int64)  # capacity in tokens of attention rows
        self._kind = np.zeros((slots, config.num_blocks), dtype=np.int8)  # 0 nothing, 1 attention, 2 ssm

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free_slots)

    def acquire(self) -> int | None:
        """A free slot, or None."""
        return self._free_slots.pop() if self._free_slots else None

    def open_attention(
        self, slot: int, block: int, tokens: int, reserved: bool = False, shared: Units | None = None
    ) -> None:
        """Give a block pages for `tokens` tokens.

        Args:
            shared: int32 `[kv_heads, pages]`, first pages that others hold too: they are read, never written.

        Raises:
            PoolExhausted: too few units; nothing changes.
        """
        assert self._kind[slot, block] == 0, f"slot {slot} block {block} already holds memory"
        pages, known = self.layout.pages(tokens), 0 if shared is None else shared.shape[1]
        units = self.pool.alloc(self.layout.kv_heads * (pages - known), reserved)
        row = self._host[slot, block, : self.layout.kv_heads * self.layout.max_pages]
        row = row.reshape(self.layout.kv_heads, self.layout.max_pages)
        row[:, known:pages] = units.reshape(-1, pages - known)
        if shared is not None:
            self.pool.retain(shared.ravel())
            row[:, :known] = shared
        self._kind[slot, block] = 1
        self._tokens[slot, block] = pages * self.layout.page_tokens
        self._publish(slot, block)

    def open_ssm(self, slot: int, block: int, reserved: bool = False) -> None:
        """Give a block its states (and ring); contents are whatever was there, the first prefill writes them.

        Raises:
            PoolExhausted: too few units; nothing changes.
        """
        assert self._kind[slot, block] == 0, f"slot {slot} block {block} already holds memory"
        units = self.pool.alloc(self.layout.state_units, reserved)
        self._host[slot, block, : len(units)] = units
        self._kind[slot, block] = 2
        self._publish(slot, block)

    def growth(self, slot: int, tokens: int) -> int:
        """Units that `grow(slot, tokens)` would take."""
        return int(len(self._short_blocks(slot, tokens)) * self.layout.kv_heads)

    def grow(self, slot: int, tokens: int) -> None:
        """Make every attention block of the slot hold `tokens` tokens, at most one page more than before.

        Raises:
            PoolExhausted: too few units; nothing changes.
        """
        blocks = self._short_blocks(slot, tokens)
        if len(blocks) == 0:
            return
        units = self.pool.alloc(len(blocks) * self.layout.kv_heads).reshape(len(blocks), self.layout.kv_heads)
        heads = np.arange(self.layout.kv_heads) * self.layout.max_pages
        pages = self._tokens[slot, blocks] // self.layout.page_tokens
        self._host[slot, blocks[:, None], heads[None, :] + pages[:, None]] = units
        self._tokens[slot, blocks] += self.layout.page_tokens
        for block in blocks:
            self._publish(slot, int(block))

    def release(self, slot: int) -> None:
        """Free all that the slot holds, and the slot."""
        self.pool.release(np.concatenate([self.units(slot, block) for block in range(self.num_blocks)]))
        self._host[slot] = SINK
        self._kind[slot] = 0
        self._tokens[slot] = 0
        if self.pool.poison:
            self.conv_tails[slot] = float("nan")
        if self.table.device.type != "cpu":
            self.table[slot] = SINK
        self._free_slots.append(slot)

    def units(self, slot: int, block: int) -> Units:
        """Units that the (slot, block) holds, a copy."""
        kind = self._kind[slot, block]
        if kind == 1:
            pages = int(self._tokens[slot, block]) // self.layout.page_tokens
            row = self._host[slot, block, : self.layout.kv_heads * self.layout.max_pages]
            return row.reshape(self.layout.kv_heads, self.layout.max_pages)[:, :pages].ravel().copy()
        return self._host[slot, block, : self.layout.state_units if kind == 2 else 0].copy()

    def held(self, slot: int) -> dict[str, int]:
        """Units that the slot holds, by kind: `attention`, `ssm`."""
        attention = int(self._tokens[slot].sum()) // self.layout.page_tokens * self.layout.kv_heads
        return {"attention": attention, "ssm": int((self._kind[slot] == 2).sum()) * self.layout.state_units}

    def totals(self) -> dict[str, int]:
        """Units held by all slots, by kind."""
        attention = int(self._tokens.sum()) // self.layout.page_tokens * self.layout.kv_heads
        return {"attention": attention, "ssm": int((self._kind == 2).sum()) * self.layout.state_units}

    def _short_blocks(self, slot: int, tokens: int) -> npt.NDArray[np.int64]:
        return np.flatnonzero((self._kind[slot] == 1) & (self._tokens[slot] < tokens))

    def _publish(self, slot: int, block: int) -> None:
        """On a device with its own memory, copy a changed row over."""
        if self.table.device.type != "cpu":
            self.table[slot, block].copy_(torch.from_numpy(self._host[slot, block]), non_blocking=True)
