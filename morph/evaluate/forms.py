"""From rows to prompts, in a short form and in a long one of 2k to 6k tokens.

Short prompts run attention everywhere by the cost rule, since there it is both cheaper and better; they prove that
nothing is lost. The long forms, many solved examples or distracting passages before the question, are where a layout
has something to decide.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from morph.errors import CorruptFile
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


# ---- long prompts


def key_value(draw: Draw) -> list[Item]:
    """A value of a JSON object (Liu et al., 2023), cut to the target length with the asked key in it."""
    items = []
    for row in draw.source.rows("kv75")[: draw.count]:
        rng = draw.rng("kv", row["id"])
        pairs = json.loads(row["context"])
        items.append(_key_value_item(draw, rng, str(row["id"]), pairs, str(row["question"])))
    return items


def _key_value_item(draw: Draw, rng: random.Random, name: str, pairs: dict[str, str], key: str) -> Item:
    size = draw.tokens(json.dumps({key: pairs[key]}))
    wanted = max(2, draw.target(rng) // size)
    others = [k for k in pairs if k != key]
    kept = set(rng.sample(others, min(wanted - 1, len(others)))) | {key}
    body = json.dumps({k: v for k, v in pairs.items() if k in kept}, indent=0)
    text = f'{body}\n\nThe value of the key "{key}" is "'
    return Item(name, text, references=(pairs[key],), max_tokens=40, stop=('"', "\n"))


PASSKEY_ASK = "There is an important pass key hidden in the text below. Find it and remember it."


def passkey(texts: str) -> Callable[[Draw], list[Item]]:
    """A number in a sentence between other texts (Mohtashami & Jaggi, 2023); `texts` names the set they come from.

    The answer is begun, as in the original: small models that are asked in a chat talk about keys instead.
    """

    def build(draw: Draw) -> list[Item]:
        rows = draw.source.rows(texts)
        filler = sorted({str(row.get("context") or row.get("document")) for row in rows})
        items = []
        for number in range(draw.count or 50):
            rng = draw.rng("passkey", number)
            key = str(rng.randrange(10_000, 100_000))
            needle = f"The pass key is {key}. Remember it. {key} is the pass key."
            parts = until_long(draw, rng, needle, filler)
            parts.insert(rng.randrange(len(parts) + 1), needle)
            text = "\n\n".join([PASSKEY_ASK, *parts, "What is the pass key? The pass key is"])
            items.append(Item(f"passkey-{number}", text, references=(key,), max_tokens=12, stop=(".", "\n")))
        return items

    return build


def qmsum(draw: Draw) -> list[Item]:
    """A question about a piece of a meeting that holds its relevant turns (Zhong et al., 2021)."""
    documents = {row["doc_id"]: str(row["document"]) for row in draw.source.rows("qmsum_docs")}
    items = []
    for row in draw.source.rows("qmsum"):
        span, whole = str(row.get("span") or ""), documents.get(row["doc_id"], "")
        rng = draw.rng("qmsum", row["id"])
        budget = int(draw.target(rng) * 3.6)  # characters
        at = max(whole.find(span[:80]), 0) if span else 0
        spare = max(budget - len(span), 0)
        begin = max(0, at - rng.randrange(spare + 1))
        text = whole[begin : begin + max(budget, min(len(span), 4 * budget))]
        message = f"{text}\n\n{row['query']}"
        items.append(Item(str(row["id"]), message, references=(str(row["summary"]),), max_tokens=128, chat=True))
    return items[: draw.count]


LONGBENCH = {
    "f1": ("2wikimqa", "hotpotqa", "multifieldqa_en", "musique", "narrativeqa", "qasper", "triviaqa"),
    "rougeL": ("gov_report", "multi_news", "qmsum", "samsum"),
    "code": ("lcc", "repobench-p"),
    "class": ("trec",),
    "number": ("passage_count", "passage_retrieval_en"),
}
PLAIN = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
"""Tasks whose prompts go on as text, without the chat format (as LongBench runs them)."""
ANSWER_TOKENS = {"f1": 48, "rougeL": 160, "code": 48, "class": 24, "number": 16}


def minilongbench(draw: Draw) -> list[Item]:
    """The items of MiniLongBench, each judged by its task's rule."""
    rules = {task: rule for rule, tasks in LONGBENCH.items() for task in tasks}
    items = []
    for row in draw.source.rows("minilongbench"):
        if row["task"] not in rules:
            raise CorruptFile(f"row {row['id']!r} of minilongbench has the task {row['task']!r}, not one of its own")
        rule, answers, classes = rules[row["task"]], row["answers"], ()
        if rule == "class":
            answers, classes = answers[0]["answers"], tuple(answers[0]["all_classes"])
        plain = row["task"] in PLAIN
        items.append(
            Item(
                f"{row['task']}/{row['id']}",
                str(row["prompt"]),
                references=tuple(map(str, answers)),
                max_tokens=ANSWER_TOKENS[rule],
                chat=not plain,
                score=rule,
                classes=classes,
                stop=("\n\n",) if rule == "code" else ("\n",) if plain else (),
            )
        )
    return items[: draw.count]
