"""The pool's books balance under any sequence of operations, and its interface stays as it is."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from morph.memory.pool import SINK, PoolExhausted, UnitPool
from morph.memory.tables import PageTables, UnitLayout
from tests.tiny import tiny_config


def test_interface_is_frozen() -> None:
    names = {n for n, _ in inspect.getmembers(UnitPool, inspect.isfunction) if not n.startswith("_")}
    assert names == {"reserve", "unreserve", "alloc", "retain", "release", "references", "exclusive", "check"}
    names = {n for n, _ in inspect.getmembers(PageTables, inspect.isfunction) if not n.startswith("_")}
    assert names == {
        "acquire", "open_attention", "open_ssm", "growth", "grow", "release", "units", "held", "totals",
    }  # fmt: skip


def test_the_sink_is_never_handed_out() -> None:
    pool = UnitPool(8, 64)
    assert SINK not in pool.alloc(8)
    with pytest.raises(PoolExhausted):
        pool.alloc(1)


def test_a_reservation_cannot_be_taken_by_others() -> None:
    pool = UnitPool(8, 64)
    assert pool.reserve(6)
    assert not pool.reserve(3)
    with pytest.raises(PoolExhausted):
        pool.alloc(3)
    assert len(pool.alloc(6, reserved=True)) == 6
    assert pool.reserved_units == 0


def test_freed_units_are_poisoned() -> None:
    pool = UnitPool(4, 64, poison=True)
    units = pool.alloc(2)
    pool.storage[torch.from_numpy(units.astype(np.int64))] = 0
    pool.release(units)
    rows = pool.storage[torch.from_numpy(units.astype(np.int64))]
    assert rows.view(torch.float32).isnan().all()
    assert rows.view(torch.bfloat16).isnan().all()


def test_double_release_is_refused() -> None:
    pool = UnitPool(4, 64)
    units = pool.alloc(1)
    pool.release(units)
    with pytest.raises(ValueError, match="free unit"):
        pool.release(units)
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random allocation, sharing and reservation against a model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = UnitPool(24, 64)
        self.held: list[np.ndarray] = []
        self.reserved = 0

    @rule(count=st.integers(0, 10))
    def alloc(self, count: int) -> None:
        if count <= self.pool.available_units:
            self.held.append(self.pool.alloc(count))
        else:
            with pytest.raises(PoolExhausted):
                self.pool.alloc(count)

    @rule(index=st.integers(0, 30))
    def share(self, index: int) -> None:
        if self.held:
            units = self.held[index % len(self.held)]
            self.pool.retain(units)
            self.held.append(units)

    @rule(index=st.integers(0, 30))
    def release(self, index: int) -> None:
        if self.held:
            self.pool.release(self.held.pop(index % len(self.held)))

    @rule(count=st.integers(1, 10))
    def reserve(self, count: int) -> None:
        assert self.pool.reserve(count) == (count <= self.pool.num_units - len(self._units()) - self.reserved)
        self.reserved = self.pool.reserved_units

    @rule()
    def use_reservation(self) -> None:
        if self.reserved:
            self.held.append(self.pool.alloc(self.reserved, reserved=True))
            self.reserved = 0

    def _units(self) -> set[int]:
        return {int(u) for units in self.held for u in units}

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        assert self.pool.free_units == self.pool.num_units - len(self._units())
        for unit in self._units():
            assert self.pool.references(unit) == sum(unit in units for units in self.held)


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_tables_hold_memory_in_proportion_to_the_layout() -> None:
    config = tiny_config()
    layout = UnitLayout.of(config, torch.float32, 512)
    pool = UnitPool(200, layout.unit_bytes)
    tables = PageTables(pool, layout, config, 2)
    slot = tables.acquire()
    assert slot is not None
    tables.open_attention(slot, 0, 100)
    tables.open_ssm(slot, 1)
    assert tables.held(slot) == {"attention": layout.attention_units(100), "ssm": config.num_state_heads}
    tables.grow(slot, layout.pages(100) * layout.page_tokens + 1)
    assert tables.held(slot)["attention"] == layout.attention_units(100) + config.num_kv_heads
    assert len(tables.units(slot, 2)) == 0
    tables.release(slot)
    assert pool.free_units == pool.num_units
    assert (tables.table == SINK).all()
