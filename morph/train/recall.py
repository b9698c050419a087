"""Synthetic recall: texts that can only be continued by looking something up far above.

Key-value lookups, numbers dropped into filler text, and questions about one of several documents. What a constant-size
state loses first is exactly this, so distillation needs it, at every length.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

CHARS_PER_TOKEN = 4.0
HEX_CHARS_PER_TOKEN = 2.0
"""Hexadecimal words take about twice the tokens of prose."""

FIRST = [
    "Ada",     "Boris",     "Chen",     "Dana",     "Emil",     "Farah",     "Goran",     "Hana",     "Ivo",
    "Jana",     "Kofi",     "Lena",     "Milo",     "Nadia",     "Omar",     "Petra",     "Quinn",     "Rosa",
    "Sami",     "Tara",     "Umar",     "Vera",     "Wim",     "Xenia",     "Yusuf",     "Zora",
]  # fmt: skip
LAST = [
    "Abel",     "Brandt",     "Costa",     "Dorn",     "Engel",     "Fischer",     "Gallo",     "Haas",
    "Ito",     "Jansen",     "Kovac",     "Lund",     "Moreau",     "Novak",     "Ortiz",     "Petrov",
    "Quist",     "Rossi",     "Silva",     "Tanaka",     "Ueda",     "Vogel",     "Weber",     "Yilmaz",
    "Zeman",
]  # fmt: skip
FACTS = {
    "was born in": ("Lisbon", "Oslo", "Nairobi", "Kyoto", "Lima", "Quebec", "Tallinn", "Cairo", "Hanoi", "Dublin"),
    "works as": (
        "a baker",
        "an engineer",
        "a nurse",
        "a pilot",
        "a translator",
        "a carpenter",
        "a chemist",
        "a teacher",
    ),
    "collects": ("old maps", "stamps", "clocks", "shells", "vinyl records", "coins", "postcards", "minerals"),
    "speaks": ("Greek", "Hindi", "Korean", "Welsh", "Swahili", "Polish", "Arabic", "Finnish", "Turkish"),
}
FILLER = (
    "The morning was quiet and the road lay empty between the fields.",
    "Nobody had opened the shop yet, and the light in the window was still off.",
    "Along the river the willows had begun to turn yellow.",
    "A train passed in the distance, and then it was silent again.",
    "The report lists the results of each year and explains how they were obtained.",
    "Most visitors stay for an afternoon and leave before the last bus.",
    "In winter the path is closed, because the bridge cannot be cleared of ice.",
    "The committee met twice and agreed to look at the question again in spring.",
    "Bread was baked on Mondays, and the whole street smelled of it.",
    "The old machine still runs, although nobody remembers who built it.",
)


@dataclass(frozen=True)
class Recall:
    """A text and the answer that follows it."""

    prompt: str
    answer: str


class RecallFactory:
    """Draws recall texts.

    Args:
        lengths: shortest and longest text in tokens, approximately; drawn log-uniformly.
    """

    def __init__(self, seed: int = 0, lengths: tuple[int, int] = (128, 4096)) -> None:
        self.rng, self.lengths = random.Random(seed), lengths

    def __iter__(self) -> Iterator[Recall]:
        while True:
            for make in (self.key_value, self.passkey, self.documents):
                yield make()

    def _tokens(self) -> float:
        low, high = self.lengths
        return float(low * (high / low) ** self.rng.random())

    def _word(self, size: int) -> str:
        return f"{self.rng.getrandbits(4 * size):0{size}x}"

    def key_value(self) -> Recall:
        """Pairs of random words, as JSON or as sentences, then several lookups."""
        size = self.rng.choice((4, 8))
        pairs: dict[str, str] = {}
        target = self._tokens() * HEX_CHARS_PER_TOKEN
        while sum(map(len, pairs)) * 2 + 10 * len(pairs) < target or len(pairs) < 4:
            pairs[self._word(size)] = self._word(size)
        asked = self.rng.sample(list(pairs), min(4, len(pairs)))
        if self.rng.random() < 0.5:
            body = json.dumps(pairs, indent=self.rng.choice((None, 1)))
            lines = [f'The value of "{key}" is "{pairs[key]}".' for key in asked]
        else:
            body = "\n".join(f"The code of {key} is {value}." for key, value in pairs.items())
            lines = [f"What is the code of {key}? It is {pairs[key]}." for key in asked]
        return Recall(f"{body}\n\n", "\n".join(lines))

    def _filler(self, chars: float) -> list[str]:
        lines: list[str] = []
        while sum(map(len, lines)) < chars:
            lines.append(self.rng.choice(FILLER))
        return lines

    def passkey(self) -> Recall:
        """Numbers with names, dropped into filler text, then asked for."""
        lines = self._filler(self._tokens() * CHARS_PER_TOKEN)
        names = self.rng.sample(("pass key", "door code", "ticket number", "locker number", "room number"), 2)
        values = [str(self.rng.randrange(10_000, 1_000_000)) for _ in names]
        for name, value in zip(names, values, strict=True):
            lines.insert(self.rng.randrange(len(lines) + 1), f"The {name} is {value}. Remember it.")
        asked = [f"What is the {name}? The {name} is {value}." for name, value in zip(names, values, strict=True)]
        return Recall(" ".join(lines) + "\n\n", "\n".join(asked))

    def documents(self) -> Recall:
        """Short descriptions of people as numbered documents, then questions about some of them."""
        target = self._tokens() * CHARS_PER_TOKEN
        people: dict[str, dict[str, str]] = {}
        while sum(len(name) + 110 for name in people) < target and len(people) < len(FIRST) * len(LAST) // 2:
            name = f"{self.rng.choice(FIRST)} {self.rng.choice(LAST)}"
            people.setdefault(name, {verb: self.rng.choice(values) for verb, values in FACTS.items()})
        parts = []
        for number, (name, facts) in enumerate(people.items(), 1):
            told = self.rng.sample(list(facts.items()), len(facts))
            parts.append(f"Document {number}: " + " ".join(f"{name} {verb} {value}." for verb, value in told))
        asked = self.rng.sample(list(people), min(3, len(people)))
        lines = []
        for name in asked:
            verb = self.rng.choice(list(FACTS))
            lines.append(f"{name} {verb} {people[name][verb]}.")
        return Recall("\n\n".join(parts) + "\n\nFrom the documents: ", " ".join(lines))
