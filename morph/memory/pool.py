"""The unit-page pool: one size of memory for KV pages, recurrent states and window rings.

One unit holds head_dim² × 4 bytes: one head's float32 state, or the keys and values of one kv head for
`page_tokens` tokens. With one size there is nothing to convert when layouts shift between attention and ssm.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from morph.errors import OutOfMemory

SINK = 0
"""Unit that padding rows point at; it is never handed out."""

Units = npt.NDArray[np.int32]


class PoolExhausted(OutOfMemory):
    """No free unit is left that is not reserved for somebody else."""


class UnitPool:
    """Units with reference counts and reservations.

    A reservation promises units to a request whose layout is not known yet: `alloc(n, reserved=True)` cannot fail
    after `reserve(m >= n)` succeeded, and `alloc(n)` never touches what is reserved.

    Args:
        num_units: units that can be handed out (the sink comes on top).
        unit_bytes: bytes of one unit.
        device: where the storage lies.
        poison: fill units with NaN when they are freed, so that a read of freed memory shows.

    Attributes:
        storage: uint8 `[num_units + 1, unit_bytes]`; row 0 is the sink.
    """

    def __init__(
        self, num_units: int, unit_bytes: int, device: torch.device | str = "cpu", poison: bool = False
    ) -> None:
        if num_units < 1:
            raise OutOfMemory(f"the pool would hold {num_units} units; give the engine more memory")
        self.num_units = num_units
        self.unit_bytes = unit_bytes
        self.poison = poison
        # empty, not zeros: on CPU the system hands out the memory when a unit is first written.
        self.storage = torch.empty((num_units + 1, unit_bytes), dtype=torch.uint8, device=device)
        self.storage[SINK].zero_()
        self._stack: Units = np.arange(num_units, 0, -1, dtype=np.int32)
        self._top = num_units
        self._references: npt.NDArray[np.int32] = np.zeros(num_units + 1, dtype=np.int32)
        self._reserved = 0

    @property
    def free_units(self) -> int:
        """Units that nobody holds, reserved ones included."""
        return self._top

    @property
    def reserved_units(self) -> int:
        """Free units that are promised."""
        return self._reserved

    @property
    def available_units(self) -> int:
        """Free units that are not promised."""
        return self._top - self._reserved

    def reserve(self, count: int) -> bool:
        """Promise `count` units; False, and nothing changes, when that many are not available."""
        if count > self.available_units:
            return False
        self._reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """Give back a promise of `count` units."""
        if not 0 <= count <= self._reserved:
            raise ValueError(f"cannot give back {count} reserved units of {self._reserved}")
        self._reserved -= count

    def alloc(self, count: int, reserved: bool = False) -> Units:
        """Take `count` units, each with one reference.

        Args:
            reserved: draw on an earlier `reserve` of the same caller.

        Raises:
            PoolExhausted: too few units; nothing is taken.
        """
        limit = self._top if reserved else self.available_units
        if count > limit or (reserved and count > self._reserved):
            raise PoolExhausted(f"{count} units asked, {limit} available of {self.num_units}")
        if reserved:
            self._reserved -= count
        taken = self._stack[self._top - count : self._top].copy()
        self._top -= count
        self._references[taken] = 1
        return taken

    def retain(self, units: Units) -> None:
        """One more reference to each unit (a shared prefix)."""
        if np.any(self._references[units] < 1):
            raise ValueError(f"retain of the free unit {units[self._references[units] < 1].ravel()[0]}")
        np.add.at(self._references, units, 1)

    def release(self, units: Units) -> None:
        """One reference less to each unit; those that nobody holds any more become free."""
        if len(units) == 0:
            return
        np.subtract.at(self._references, units, 1)
        left = self._references[units]
        if left.min() < 0:
            np.add.at(self._references, units, 1)
            raise ValueError(f"release of the free unit {units[left < 0][0]}")
        freed = units[left == 0]
        if len(freed) > 1:
            freed = np.sort(freed)
            freed = freed[np.concatenate(([True], freed[1:] != freed[:-1]))]
        if self.poison and len(freed):
            self.storage[torch.from_numpy(freed.astype(np.int64))] = 0xFF
        self._stack[self._top : self._top + len(freed)] = freed
        self._top += len(freed)

    def exclusive(self, references: npt.NDArray[np.int32]) -> int:
        """How many units have all of their references among these, int32 `[num_units + 1]`."""
        return int(np.count_nonzero((references > 0) & (references == self._references)))

    def references(self, unit: int) -> int:
        """How many hold the unit."""
        return int(self._references[unit])

    def check(self) -> None:
        """Raise AssertionError when the books do not balance."""
        free = self._stack[: self._top]
        assert len(np.unique(free)) == self._top, "a unit is on the free list twice"
        assert SINK not in free, "the sink is on the free list"
        assert not np.any(self._references[free]), "a free unit has a reference"
        held = int(np.count_nonzero(self._references[1:]))
        assert held + self._top == self.num_units, f"{held} held + {self._top} free != {self.num_units} units"
        assert 0 <= self._reserved <= self._top, f"{self._reserved} reserved of {self._top} free units"
