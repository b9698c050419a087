"""Where checkpoints are taken inside a prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

LEAST = 16
"""Tokens that a checkpoint where prompts part must save at least."""
GAP = 64
"""Tokens between two checkpoints of one prompt: states cost as much as some hundred tokens of keys and values."""


def cuts(
    tokens: Sequence[int],
    begin: int,
    limit: int,
    ends: Collection[int],
    parting: int,
    expected: int = 0,
    most: int = 4,
    gap: int = GAP,
) -> list[int]:
    """Positions of checkpoints, ascending; a position is a number of tokens before it.

    The end is always one. Then, while `most` allows: where the prompt parts from what is stored (somebody else came
    this way, so others will), where others like it parted, the end of the first message, the ends of the last ones.

    Args:
        begin: tokens that are restored, not computed. limit: the last position that a hit could use.
        ends: token ids that end a chat message.
        parting: tokens that the prompt shares with a stored path. expected: the place that `Tails` names.
        gap: least distance between two message ends, and from `begin`.
    """
    if limit <= begin:
        return []
    found = [limit]

    def add(position: int) -> None:
        if begin + gap <= position < limit and all(abs(position - other) >= gap for other in found):
            found.append(position)

    if begin + LEAST <= parting < limit:
        found.append(parting)
    if len(found) < most:
        add(expected)
    messages = [i + 1 for i in range(begin, limit) if tokens[i] in ends]
    for position in messages[:1] + messages[:0:-1]:
        if len(found) >= most:
            break
        add(position)
    return sorted(found)


class Tails:
    """Learns how many tokens at a prompt's end are its own, to place a checkpoint before prompts part there.

    A document with a question behind it is asked about again. Where it ends shows only once a second prompt has parted
    from the first, and the second finds no state there; so the state is kept where earlier traffic parted, counted from
    the end. The tail is chosen that would have saved the most tokens over the last lookups, each at its own length.

    Args:
        window: lookups that are remembered. grid: positions are multiples of it, so that prompts agree on one.
    """

    def __init__(self, window: int = 64, grid: int = 64) -> None:
        self.grid = grid
        self._seen: deque[tuple[int, int]] = deque(maxlen=window)

    def saw(self, tokens: int, matched: int) -> None:
        """A prompt of so many tokens shared `matched` of them with something stored."""
        self._seen.append((tokens, matched))

    def place(self, tokens: int) -> int:
        """Where the prompt will part from others like it; 0 when nothing says so."""
        if not self._seen:
            return 0
        length, matched = np.array(self._seen).T
        own = length - matched
        # saves[i, j]: tokens that a state at lookup i's tail would have saved lookup j.
        saves = np.where(own[None, :] <= own[:, None], np.maximum(length[None, :] - own[:, None], 0), 0)
        usable = (matched > 0) & (own < tokens)
        total = np.where(usable, saves.sum(axis=1), 0)
        best = int(total.argmax())
        # One prompt in eight must have shared that much, else a state is kept for nobody.
        if not total[best] or 8 * np.count_nonzero(saves[best]) < len(self._seen):
            return 0
        return (tokens - int(own[best])) // self.grid * self.grid


class Trust:
    """How often gates follow what is stored, to know when a hit is worth trying.

    Behind a hit whose layout is not known yet, the rest of the prompt runs until a gate chooses what nobody stored; its
    rows are then lost. So a short hit in a long prompt must be likely to hold.

    Args:
        memory: share of the past that a new observation leaves.
    """

    def __init__(self, memory: float = 0.95) -> None:
        self.memory = memory
        self._followed, self._lost = 1.0, 0.125

    def followed(self) -> None:
        """A hit held to the last block."""
        self._age()
        self._followed += 1

    def strayed(self, share: float) -> None:
        """It did not; `share` of the blocks had run."""
        self._age()
        self._lost += share

    def worth(self, hit: int, tokens: int) -> bool:
        """True when a hit of so many tokens saves more than it puts at risk."""
        return self._followed * hit >= self._lost * (tokens - hit)

    def _age(self) -> None:
        self._followed *= self.memory
        self._lost *= self.memory


def first_message(tokens: Sequence[int], ends: Collection[int], gap: int = GAP) -> int:
    """Tokens up to the end of the first message that is at least `gap` tokens long; all where there is none."""
    begin = 0
    for at, token in enumerate(tokens, 1):
        if token in ends:
            if at - begin >= gap:
                return at
            begin = at
    return len(tokens)
