"""Who leaves first. Three policies over the same entries, so that they can be compared.

`greedy_dual`: FLOPs saved per byte and hits, aged by a clock that rises to the value of what was evicted last
(GreedyDual-Size with frequency; Cao & Irani 1997, Cherkasova 1998), its two exponents tuned by a bounded replay.
`lru`: least recently used. `marconi`: recency + α · FLOPs per byte, both min-max normalised (Pan et al., 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Literal, Protocol

from morph.cache.snapshot import Snapshot

PolicyName = Literal["greedy_dual", "lru", "marconi"]
POLICIES: tuple[PolicyName, ...] = ("greedy_dual", "lru", "marconi")


class Evictor(Protocol):
    """Orders snapshots; told of each one that is stored, hit or gone."""

    def touch(self, snapshot: Snapshot, now: float) -> None:
        """It was stored or hit; its `gain`, `units` and `hits` are up to date."""
        ...

    def victims(self, snapshots: Iterable[Snapshot], now: float) -> Iterable[Snapshot]:
        """Those to drop, the least valuable first; may name some that are `gone` or pinned."""
        ...


class _Heap:
    """Snapshots by `weight`, smallest first; an entry is stale when its snapshot was touched since."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Snapshot]] = []
        self._count, self._limit = 0, 1024

    def push(self, snapshot: Snapshot) -> None:
        self._count += 1
        snapshot.stamp = self._count
        heapq.heappush(self._heap, (snapshot.weight, snapshot.stamp, snapshot))
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if not entry[2].gone and entry[2].stamp == entry[1]]
            heapq.heapify(self._heap)
            self._limit = max(1024, 2 * len(self._heap))

    def pop(self) -> Snapshot | None:
        while self._heap:
            _, stamp, snapshot = heapq.heappop(self._heap)
            if not snapshot.gone and snapshot.stamp == stamp:
                return snapshot
        return None

    def drain(self) -> Iterable[Snapshot]:
        """Pop one after the other; those that were not dropped go back when the reader stops."""
        kept: list[Snapshot] = []
        try:
            while (snapshot := self.pop()) is not None:
                yield snapshot
                if not snapshot.gone:
                    kept.append(snapshot)
        finally:
            for snapshot in kept:
                self.push(snapshot)


class LeastRecent:
    """LRU."""

    def __init__(self) -> None:
        self._heap = _Heap()

    def touch(self, snapshot: Snapshot, now: float) -> None:
        """See `Evictor.touch`."""
        snapshot.used = snapshot.weight = now
        self._heap.push(snapshot)

    def victims(self, snapshots: Iterable[Snapshot], now: float) -> Iterable[Snapshot]:
        """See `Evictor.victims`."""
        return self._heap.drain()


class GreedyDual:
    """GreedyDual with frequency: value = clock + (hits + 1) ** frequency · (FLOPs per unit, over its mean) ** worth.

    With both exponents 0 this is LRU. `tuning.Tuner` chooses between several while the engine runs.
    """

    def __init__(self, frequency: float = 1.0, worth: float = 1.0) -> None:
        self.frequency, self.worth = frequency, worth
        self._heap, self._clock, self._mean = _Heap(), 0.0, 0.0

    def touch(self, snapshot: Snapshot, now: float) -> None:
        """See `Evictor.touch`."""
        worth = snapshot.gain / max(1, snapshot.units)
        self._mean = worth if not self._mean else 0.98 * self._mean + 0.02 * worth
        relative = (worth / self._mean) ** self.worth if self._mean > 0 else 1.0
        snapshot.used = now
        snapshot.weight = self._clock + (1 + snapshot.hits) ** self.frequency * relative
        self._heap.push(snapshot)

    def victims(self, snapshots: Iterable[Snapshot], now: float) -> Iterable[Snapshot]:
        """See `Evictor.victims`."""
        for snapshot in self._heap.drain():
            try:
                yield snapshot
            finally:
                if snapshot.gone:
                    self._clock = max(self._clock, snapshot.weight)


class Marconi:
    """Recency + α · FLOPs per byte over all entries, each scaled to 0…1."""

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha

    def touch(self, snapshot: Snapshot, now: float) -> None:
        """See `Evictor.touch`."""
        snapshot.used = now

    def victims(self, snapshots: Iterable[Snapshot], now: float) -> Iterable[Snapshot]:
        """See `Evictor.victims`."""
        known = list(snapshots)
        recency = _scaled([1.0 / max(1e-9, now - s.used) for s in known])
        worth = _scaled([s.gain / max(1, s.units) for s in known])
        scores = [r + self.alpha * w for r, w in zip(recency, worth, strict=True)]
        return (known[i] for i in sorted(range(len(known)), key=scores.__getitem__))


def _scaled(values: list[float]) -> list[float]:
    if not values:
        return []
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def make_evictor(name: PolicyName) -> Evictor:
    """The policy of that name."""
    return {"greedy_dual": GreedyDual, "lru": LeastRecent, "marconi": Marconi}[name]()
