"""Prompts that are long by nature: recall among distractors, meetings, and LongBench's tasks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from morph.errors import CorruptFile
from morph.evaluate.forms import Draw, until_long
from morph.evaluate.items import Item


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
