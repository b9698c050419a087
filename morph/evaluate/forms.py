"""From rows to prompts, in a short form and in a long one of 2k to 6k tokens.

Short prompts run attention everywhere by the cost rule, since there it is both cheaper and better; they prove that
nothing is lost. The long forms, many solved examples or distracting passages before the question, are where a layout
has something to decide.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from morph.evaluate.items import Item
from morph.evaluate.sources import MissingData, Row, Source

LONG = (2000, 6000)
"""Tokens of a long form: each item's target is drawn log-uniformly from this range."""

POOL_SHARE = 0.25
"""The last rows of a set are kept for examples and distractors of the long forms, and are no items there."""


@dataclass(frozen=True)
class Draw:
    """What building a set needs to know.

    Attributes:
        tokenizer: counts tokens. count: items at most, None = all. seed: of examples and lengths.
        longest: tokens that prompt and answer may have together.
        lengths: range of the long forms' targets in tokens.
    """

    source: Source
    tokenizer: Any
    count: int | None
    longest: int
    seed: int = 0
    lengths: tuple[int, int] = LONG

    def rng(self, *key: object) -> random.Random:
        """Random numbers of one item: the same whatever else is drawn."""
        return random.Random(":".join(map(str, (self.seed, *key))))

    def tokens(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def target(self, rng: random.Random) -> int:
        """Length of one long item in tokens."""
        low, high = self.lengths
        return int(min(low * (high / low) ** rng.random(), self.longest - 400))


def split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Rows to ask, and rows for examples and distractors."""
    kept = max(1, round(len(rows) * POOL_SHARE))
    if len(rows) < 2:
        raise MissingData(f"a set of {len(rows)} rows has none to spare for the examples of its long form; add rows")
    return rows[:-kept], rows[-kept:]


def until_long(draw: Draw, rng: random.Random, fixed: str, texts: Sequence[str]) -> list[str]:
    """Different texts in random order until, with `fixed`, the target length is reached; all where they are too few."""
    left = draw.target(rng) - draw.tokens(fixed)
    order = list(range(len(texts)))
    rng.shuffle(order)
    chosen: list[str] = []
    for index in order:
        size = draw.tokens(texts[index]) + 2
        if size > left:
            # One that is too long may be followed by one that fits; what is left is small by then.
            if left < 120:
                break
            continue
        chosen.append(texts[index])
        left -= size
    return chosen


# ---- multiple choice

ASK: dict[str, Callable[[Row], str]] = {
    # The prompts of lm-eval's tasks of the same names, so that figures can be compared.
    "arc_challenge": lambda row: f"Question: {row['question']}\nAnswer:",
    "openbookqa": lambda row: str(row["question"]),
    "hellaswag": lambda row: str(row["question"]),
    "boolq": lambda row: f"{row['context']}\nQuestion: {row['question']}?\nAnswer:",
}


def options(name: str, row: Row) -> tuple[str, ...]:
    """The choices' texts; BoolQ's are yes and no."""
    return ("no", "yes") if name == "boolq" else tuple(str(choice) for choice in row["choices"])


def choice_item(name: str, row: Row, before: str = "") -> Item:
    """A row as an item, with text before its question."""
    return Item(str(row["id"]), before + ASK[name](row), choices=options(name, row), gold=int(row["answer"]))


def short_choices(name: str) -> Callable[[Draw], list[Item]]:
    """One question each."""
    return lambda draw: [choice_item(name, row) for row in draw.source.rows(name)[: draw.count]]


def many_shot(name: str) -> Callable[[Draw], list[Item]]:
    """Solved examples from rows that are no items, then a question."""

    def build(draw: Draw) -> list[Item]:
        asked, pool = split(draw.source.rows(name))
        shots = [f"{ASK[name](row)} {options(name, row)[int(row['answer'])]}" for row in pool]
        items = []
        for row in asked[: draw.count]:
            chosen = until_long(draw, draw.rng(name, row["id"]), ASK[name](row), shots)
            items.append(choice_item(name, row, "".join(f"{shot}\n\n" for shot in chosen)))
        return items

    return build


def placed(rng: random.Random, own: str, others: Sequence[str]) -> str:
    """Numbered passages with the item's own at a random place."""
    passages = list(others)
    passages.insert(rng.randrange(len(passages) + 1), own)
    return "\n\n".join(f"Passage {number}:\n{text}" for number, text in enumerate(passages, 1))


def boolq_long(draw: Draw) -> list[Item]:
    """The passage among passages of other rows."""
    asked, pool = split(draw.source.rows("boolq"))
    texts = sorted({str(row["context"]) for row in pool})
    items = []
    for row in asked[: draw.count]:
        rng = draw.rng("boolq", row["id"])
        others = until_long(draw, rng, ASK["boolq"](row), [text for text in texts if text != row["context"]])
        items.append(choice_item("boolq", row | {"context": placed(rng, str(row["context"]), others)}))
    return items


# ---- questions about a text

SHOTS = 2
"""Solved questions before each question about a text: without them, small models answer in sentences."""


def question_text(row: Row, context: str) -> str:
    """A question about a text, up to its answer."""
    return f"{context}\n\nQuestion: {row['question']}\nAnswer:"


def solved(rows: Sequence[Row]) -> str:
    """Questions about texts with their answers, to stand before another."""
    return "".join(f"{question_text(row, str(row['context']))} {row['answers'][0]}\n\n" for row in rows)


def squad_rows(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Rows to ask, and the last ones, which are solved before each question."""
    if len(rows) <= SHOTS:
        raise MissingData(f"a set of {len(rows)} questions has none beside its {SHOTS} examples; add rows")
    return rows[:-SHOTS], rows[-SHOTS:]


def _question(row: Row, examples: Sequence[Row], context: str) -> Item:
    text = solved(examples) + question_text(row, context)
    return Item(str(row["id"]), text, references=tuple(row["answers"]), max_tokens=24, stop=("\n",))


def squad(draw: Draw) -> list[Item]:
    """One passage and a question, after solved examples."""
    asked, examples = squad_rows(draw.source.rows("squad"))
    return [_question(row, examples, str(row["context"])) for row in asked[: draw.count]]


def squad_long(draw: Draw) -> list[Item]:
    """The passage among passages of other articles, after solved examples."""
    rows, examples = squad_rows(draw.source.rows("squad"))
    asked, pool = split(rows)
    texts = sorted({(str(row["context"]), str(row.get("title"))) for row in pool})
    items = []
    for row in asked[: draw.count]:
        rng = draw.rng("squad", row["id"])
        others = [text for text, title in texts if title != str(row.get("title")) and text != row["context"]]
        fixed = solved(examples) + question_text(row, str(row["context"]))
        chosen = until_long(draw, rng, fixed, others)
        items.append(_question(row, examples, placed(rng, str(row["context"]), chosen)))
    return items


# ---- summaries

SUMMARISE = {
    "dialogsum": ("Summarize this conversation in one or two sentences.", "Conversation", 80),
    "scitldr": ("Summarize this abstract in one sentence.", "Abstract", 64),
}


def _references(row: Row) -> tuple[str, ...]:
    return tuple(row.get("summaries") or [row["summary"]])


def short_summary(name: str) -> Callable[[Draw], list[Item]]:
    """One document."""
    ask, _, tokens = SUMMARISE[name]

    def build(draw: Draw) -> list[Item]:
        return [
            Item(str(r["id"]), f"{ask}\n\n{r['document']}", references=_references(r), max_tokens=tokens, chat=True)
            for r in draw.source.rows(name)[: draw.count]
        ]

    return build


def many_shot_summary(name: str) -> Callable[[Draw], list[Item]]:
    """Documents with their summaries, then one without."""
    ask, word, tokens = SUMMARISE[name]

    def build(draw: Draw) -> list[Item]:
        asked, pool = split(draw.source.rows(name))
        shots = [f"{word}:\n{row['document']}\nSummary: {row['summary']}" for row in pool]
        items = []
        for row in asked[: draw.count]:
            own = f"{word}:\n{row['document']}\nSummary:"
            chosen = until_long(draw, draw.rng(name, row["id"]), own, shots)
            text = "\n\n".join([*chosen, own])
            message = f"{ask} Examples come first; the last one is yours.\n\n{text}"
            items.append(Item(str(row["id"]), message, references=_references(row), max_tokens=tokens, chat=True))
        return items

    return build
