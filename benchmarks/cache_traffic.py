"""Traffic with shared prefixes for `benchmarks/cache_replay.py`: recorded articles and conversations, public traces."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        prompt, answer: token ids.
        bits: the gates' layout. regret: cost of each block's decision against the gate, nats; tau: nats per second.
        group: article, conversation or session.
    """

    prompt: list[int]
    answer: list[int]
    bits: tuple[bool, ...]
    regret: npt.NDArray[np.float32]
    tau: float
    group: int


class Recorded:
    """One workload of `benchmarks/cache_record.py`."""

    def __init__(self, file: Path, name: str, budget: float, early: bool = False) -> None:
        self._arrays = {
            key[len(name) + 1 :]: value for key, value in np.load(file).items() if key.startswith(name + ".")
        }
        if not self._arrays:
            raise ValueError(f"{file} has no workload {name!r}")
        lengths = self._arrays["prompt_len"].astype(int) + self._arrays["answer_len"]
        self._begin = np.concatenate(([0], np.cumsum(lengths)))
        self._bits = self._arrays[f"{'early' if early else 'bits'}_{budget:g}"]
        self._regret = self._arrays[f"regret_{budget:g}"]
        self._tau = float(self._arrays[f"tau_{budget:g}"])
        self.group = self._arrays["group"]
        self.turn = self._arrays["turn"]

    def __len__(self) -> int:
        return len(self.group)

    def row(self, index: int) -> Turn:
        """One recorded request."""
        tokens = self._arrays["tokens"][self._begin[index] : self._begin[index + 1]].tolist()
        cut = int(self._arrays["prompt_len"][index])
        bits = tuple(self._bits[index].tolist())
        return Turn(tokens[:cut], tokens[cut:], bits, self._regret[index], self._tau, int(self.group[index]))

    def layouts(self) -> list[list[Turn]]:
        """Rows by group, without tokens: decisions to lend to traces that have no text."""
        return [
            [
                Turn([], [], tuple(self._bits[i].tolist()), self._regret[i], self._tau, int(g))
                for i in np.flatnonzero(self.group == g)
            ]
            for g in np.unique(self.group)
        ]


def articles(recorded: Recorded, count: int, requests: int, exponent: float = 0.8, seed: int = 0) -> list[Turn]:
    """Questions about the first `count` articles: the article by Zipf's law, then a question of it, both at random."""
    rng = random.Random(seed)
    rows = {int(g): np.flatnonzero(recorded.group == g).tolist() for g in np.unique(recorded.group)[:count]}
    if len(rows) < count:
        raise ValueError(f"{count} articles asked, {len(rows)} recorded")
    order = list(rows)
    rng.shuffle(order)
    weights = [1 / (rank + 1) ** exponent for rank in range(count)]
    return [recorded.row(rng.choice(rows[g])) for g in rng.choices(order, weights, k=requests)]


def conversations(recorded: Recorded, open_: int = 12, seed: int = 0) -> list[Turn]:
    """All recorded conversations, `open_` of them interleaved at any time."""
    rng = random.Random(seed)
    waiting = [np.flatnonzero(recorded.group == g).tolist() for g in np.unique(recorded.group)]
    rng.shuffle(waiting)
    running: list[list[int]] = []
    turns = []
    while waiting or running:
        while waiting and len(running) < open_:
            running.append(waiting.pop())
        talk = rng.choice(running)
        turns.append(recorded.row(talk.pop(0)))
        if not talk:
            running.remove(talk)
    return turns


def mooncake(file: Path, requests: int, layouts: Sequence[Sequence[Turn]], begin: int = 0) -> list[Turn]:
    """Some requests of a Mooncake trace: equal hash ids are equal tokens.

    The trace names whole blocks only. A request that has all whole blocks of an earlier one, and room for its answer,
    goes on from it: then it begins with that request's tokens and answer. And the trace has no text, so each session
    borrows the decisions of one recorded article, and each of its requests those of one question: they vary within a
    session as they do there.
    """
    turns: list[Turn] = []
    ends: dict[tuple[int, ...], int] = {}
    with gzip.open(file, "rt") as lines:
        for number, line in enumerate(itertools.islice(lines, begin, begin + requests)):
            entry: dict[str, Any] = json.loads(line)
            ids = tuple(entry["hash_ids"])
            size = entry["input_len"]
            blocks = np.array(ids, np.int64)[:, None] * BLOCK + np.arange(BLOCK)
            prompt = (blocks.ravel()[:size] % (2**31 - 1)).astype(np.int32).tolist()
            answer = (np.arange(entry["output_len"]) + 2**30 + number * 2048).astype(np.int32).tolist()
            group = number
            for whole in range(len(ids), 0, -1):
                if (earlier := ends.get(ids[:whole])) is not None:
                    before = turns[earlier]
                    group = before.group
                    told = before.prompt + before.answer
                    if len(told) <= size:
                        prompt[: len(told)] = told
                        break
            ends[ids[: size // BLOCK]] = number
            family = layouts[random.Random(group).randrange(len(layouts))]
            lent = family[random.Random(number).randrange(len(family))]
            turns.append(Turn(prompt, answer, lent.bits, lent.regret, lent.tau, group))
    return turns
