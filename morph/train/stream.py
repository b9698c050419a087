"""Packed sequences from several token sets by weight, in an order that a step number determines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from morph.errors import InvalidRequest
from morph.train.tokens import TokenSet

HELD_OUT = 0.01
"""Share of each set's documents that is never trained on; none of a set with fewer than `MIN_DOCUMENTS`."""
MIN_DOCUMENTS = 50


@dataclass
class Batch:
    """Sequences of one length.

    Attributes:
        tokens: int64 `[rows, length]`. answer: bool, same shape: part of an answer.
    """

    tokens: torch.Tensor
    answer: torch.Tensor


class PackedStream:
    """The documents of one set, shuffled anew each epoch and cut into sequences without padding.

    Args:
        documents: indices of the set's documents that belong to the stream.
    """

    def __init__(self, tokens: TokenSet, documents: npt.NDArray[np.int64], seed: int) -> None:
        self.tokens, self.documents = tokens, documents
        # A stream's order depends on its name, not on its place among the sources.
        self._seed = [seed, int.from_bytes(hashlib.sha256(tokens.name.encode()).digest()[:4], "big")]
        self._starts = np.concatenate([[0], tokens.ends[:-1]])
        self.size = int((tokens.ends - self._starts)[documents].sum())
        self._epoch = -1

    def window(self, offset: int, length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """`length` tokens from `offset` tokens into the endless stream, and which belong to answers."""
        parts, marks = [], []
        while length:
            epoch, inside = divmod(offset, self.size)
            self._order(epoch)
            at = int(np.searchsorted(self._bounds, inside, side="right")) - 1
            skip = inside - int(self._bounds[at])
            document = int(self._shuffled[at])
            begin = int(self._starts[document]) + skip
            end = min(int(self.tokens.ends[document]), begin + length)
            parts.append(self.tokens.tokens[begin:end].astype(np.int64))
            answer = self.tokens.answer
            marks.append(np.zeros(end - begin, bool) if answer is None else answer[begin:end].astype(bool))
            offset, length = offset + end - begin, length - (end - begin)
        return np.concatenate(parts), np.concatenate(marks)

    def _order(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        rng = np.random.default_rng([*self._seed, epoch])
        self._shuffled = rng.permutation(self.documents)
        lengths = self.tokens.ends[self._shuffled] - self._starts[self._shuffled]
        # Empty documents would be found by the search but give nothing.
        self._shuffled = self._shuffled[lengths > 0]
        self._bounds = np.concatenate([[0], np.cumsum(lengths[lengths > 0])[:-1]])
        self._epoch = epoch


class Mixture:
    """Draws sequences so that every source's share of the tokens stays as close to its weight as can be.

    Args:
        sources: sets with their weights, relative.

    Raises:
        InvalidRequest: no sources, a weight that is not positive, or a set with too few tokens.
    """

    def __init__(self, sources: Sequence[tuple[TokenSet, float]], seed: int, longest: int) -> None:
        if not sources:
            raise InvalidRequest("there is no data to train on; name some with --data")
        self.streams: list[PackedStream] = []
        self.held_out: list[PackedStream] = []
        for tokens, weight in sources:
            if not weight > 0:
                raise InvalidRequest(f"data {tokens.name} has weight {weight}; give a positive number")
            training, held = _split(tokens)
            stream = PackedStream(tokens, training, seed)
            if stream.size < longest:
                raise InvalidRequest(
                    f"data {tokens.name} has {stream.size} tokens, less than one sequence of {longest}; give more text "
                    "or shorter lengths"
                )
            self.streams.append(stream)
            if len(held):
                self.held_out.append(PackedStream(tokens, held, seed))
        total = sum(weight for _, weight in sources)
        self.weights = [weight / total for _, weight in sources]
        self.offsets = [0] * len(sources)

    def batch(self, rows: int, length: int, begin: int = 0, end: int | None = None) -> Batch:
        """The next `rows` sequences, of which only `begin` to `end` are read (the others are another process's)."""
        end = rows if end is None else end
        tokens, answers = [], []
        for row in range(rows):
            drawn = sum(self.offsets) + length
            lag = [weight * drawn - offset for weight, offset in zip(self.weights, self.offsets, strict=True)]
            source = int(np.argmax(lag))
            if begin <= row < end:
                ids, answer = self.streams[source].window(self.offsets[source], length)
                tokens.append(ids)
                answers.append(answer)
            self.offsets[source] += length
        if not tokens:
            return Batch(torch.empty(0, length, dtype=torch.long), torch.empty(0, length, dtype=torch.bool))
        return Batch(torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(answers)))

    def skip(self, rows: int, length: int) -> None:
        """Pass over what `batch` would have drawn."""
        self.batch(rows, length, rows, rows)

    def probe(self, rows: int, length: int) -> torch.Tensor:
        """Held-out sequences, or where nothing is held out the first ones of the training text: for measurements."""
        held = self.held_out_batch(rows, length)
        if held is not None:
            return held.tokens
        windows = [
            self.streams[i % len(self.streams)].window(i // len(self.streams) * length, length)[0] for i in range(rows)
        ]
        return torch.from_numpy(np.stack(windows))

    def held_out_batch(self, rows: int, length: int) -> Batch | None:
        """The same `rows` sequences each time, of documents that are never trained on, sources in turn; None = none."""
        streams = [stream for stream in self.held_out if stream.size >= length]
        if not streams:
            return None
        windows = [streams[i % len(streams)].window(i // len(streams) * length, length) for i in range(rows)]
        tokens, answers = zip(*windows, strict=True)
        return Batch(torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(answers)))

    def state(self) -> dict[str, Any]:
        """Tokens drawn so far, by source."""
        return {stream.tokens.name: offset for stream, offset in zip(self.streams, self.offsets, strict=True)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`.

        Raises:
            InvalidRequest: it is of other sources.
        """
        names = [stream.tokens.name for stream in self.streams]
        if sorted(state) != sorted(names):
            raise InvalidRequest(
                f"the run was made with data {', '.join(sorted(state))}, now it is {', '.join(sorted(names))}; "
                "give the same data, or another --out"
            )
        self.offsets = [int(state[name]) for name in names]


def _split(tokens: TokenSet) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Training documents and held-out ones; the same split in every run."""
    order = np.random.default_rng(0).permutation(len(tokens.ends)).astype(np.int64)
    held = int(len(order) * HELD_OUT) if len(order) >= MIN_DOCUMENTS else 0
    if len(order) >= MIN_DOCUMENTS:
        held = max(1, held)
    return np.sort(order[held:]), np.sort(order[:held])
