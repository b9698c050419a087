"""Where checkpoints are taken inside a prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence

LEAST = 16
"""Tokens that a checkpoint where prompts part must save at least."""
GAP = 64
"""Tokens between two checkpoints of one prompt: states cost as much as some hundred tokens of keys and values."""


def cuts(
    tokens: Sequence[int], begin: int, limit: int, ends: Collection[int], parting: int, most: int = 4, gap: int = GAP
) -> list[int]:
    """Positions of checkpoints, ascending; a position is a number of tokens before it.

    The end is always one. Then, while `most` allows: where the prompt parts from what is stored (somebody else came
    this way, so others will), the end of the first message, the ends of the last ones.

    Args:
        begin: tokens that are restored, not computed. limit: the last position that a hit could use.
        ends: token ids that end a chat message.
        parting: tokens that the prompt shares with a stored path.
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
    messages = [i + 1 for i in range(begin, limit) if tokens[i] in ends]
    for position in messages[:1] + messages[:0:-1]:
        if len(found) >= most:
            break
        add(position)
    return sorted(found)


def first_message(tokens: Sequence[int], ends: Collection[int], gap: int = GAP) -> int:
    """Tokens up to the end of the first message that is at least `gap` tokens long; all where there is none."""
    begin = 0
    for at, token in enumerate(tokens, 1):
        if token in ends:
            if at - begin >= gap:
                return at
            begin = at
    return len(tokens)
