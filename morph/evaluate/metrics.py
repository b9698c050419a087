"""How good an answer is, and how sure one can be of a mean.

Exact match and F1 follow SQuAD's rules (Rajpurkar et al., 2016): lower case, without punctuation and articles. ROUGE
is the package `rouge-score` with stemming (Lin, 2004). The scores of MiniLongBench's tasks follow LongBench (Bai et
al., 2024).
"""

from __future__ import annotations

import difflib
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from morph.errors import MorphError
from morph.evaluate.items import Item

Array = npt.NDArray[np.float64]

# ---- written answers

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """SQuAD's: lower case, no punctuation, no articles, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 where the normalised answer is one of the references."""
    return float(any(normalise(answer) == normalise(reference) for reference in references))


def token_f1(answer: str, reference: str) -> float:
    """F1 over the words of two normalised texts; 1 where both are empty."""
    ours, theirs = normalise(answer).split(), normalise(reference).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs))


def best_f1(answer: str, references: Sequence[str]) -> float:
    """F1 to the closest reference."""
    return max((token_f1(answer, reference) for reference in references), default=0.0)


def contains(answer: str, references: Sequence[str]) -> float:
    """1 where a reference stands in the answer, as retrieval tasks count it."""
    return float(any(reference.strip().lower() in answer.lower() for reference in references))


@cache
def _rouge() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError as error:
        raise MorphError("ROUGE needs the package `rouge-score`: pip install 'morph-hybrid[eval]'") from error
    return rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)


def rouge(answer: str, references: Sequence[str]) -> dict[str, float]:
    """F of ROUGE-1, 2 and L, each to its best reference."""
    found = _rouge().score_multi(list(references), answer)
    return {name: float(found[name].fmeasure) for name in ("rouge1", "rouge2", "rougeL")}


# ---- scores of mixed tasks


def first_line_similarity(answer: str, references: Sequence[str]) -> float:
    """Similarity of the first line of code that is no comment and no fence to the wanted line."""
    lines = [line for line in answer.lstrip("\n").split("\n") if not line.lstrip().startswith(("`", "#", "//"))]
    line = lines[0] if lines else ""
    return max((difflib.SequenceMatcher(None, line, reference).ratio() for reference in references), default=0.0)


def classification(answer: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """The wanted label's share of the labels that the answer names; labels inside the wanted one do not count."""
    named = [label for label in classes if label in answer]
    wanted = references[0]
    named = [label for label in named if label == wanted or label not in wanted]
    return 1.0 / len(named) if wanted in named else 0.0


def number_share(answer: str, references: Sequence[str]) -> float:
    """Share of the answer's numbers that are the wanted one."""
    numbers = re.findall(r"\d+", answer)
    wanted = re.findall(r"\d+", references[0])
    return sum(number in wanted for number in numbers) / len(numbers) if numbers else 0.0


SCORES: dict[str, Callable[[str, Item], float]] = {
    "f1": lambda answer, item: best_f1(answer, item.references),
    "rougeL": lambda answer, item: rouge(answer, item.references)["rougeL"],
    "code": lambda answer, item: first_line_similarity(answer, item.references),
    "class": lambda answer, item: classification(answer, item.references, item.classes),
    "number": lambda answer, item: number_share(answer, item.references),
}
"""Rules for sets that mix tasks."""


def judge_text(answer: str, item: Item, metrics: Sequence[str]) -> dict[str, float]:
    """The named metrics of a written answer, 0…1 each."""
    found: dict[str, float] = {}
    if any(name.startswith("rouge") for name in metrics):
        found |= rouge(answer, item.references)
    rules: dict[str, Callable[[], float]] = {
        "em": lambda: exact_match(answer, item.references),
        "f1": lambda: best_f1(answer, item.references),
        "contains": lambda: contains(answer, item.references),
        "score": lambda: SCORES[item.score or "f1"](answer, item),
    }
    return {name: found[name] if name in found else rules[name]() for name in metrics}


# ---- choices


def choose(logprobs: Sequence[float], lengths: Sequence[int] | None = None) -> int:
    """Index of the likeliest choice, by log probability per character where lengths are given; the first of equals."""
    values = list(logprobs) if lengths is None else [p / n for p, n in zip(logprobs, lengths, strict=True)]
    return max(range(len(values)), key=values.__getitem__)


def judge_choice(logprobs: Sequence[float], item: Item) -> dict[str, float]:
    """`acc` by log probability, `acc_norm` by log probability per character of the choice (as lm-eval does)."""
    lengths = [len(choice) for choice in item.choices]
    return {"acc": float(choose(logprobs) == item.gold), "acc_norm": float(choose(logprobs, lengths) == item.gold)}


def choice_kl(base: Sequence[float], other: Sequence[float]) -> float:
    """KL(base || other) in nats of the distributions over an item's choices."""

    def normal(logprobs: Sequence[float]) -> Array:
        values = np.asarray(logprobs, dtype=np.float64)
        values = values - values.max()
        return np.asarray(values - math.log(float(np.exp(values).sum())))

    p, q = normal(base), normal(other)
    return float((np.exp(p) * (p - q)).sum())


# ---- means

DRAWS = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % bootstrap interval over items."""

    value: float
    low: float
    high: float

    def to_dict(self, scale: float = 1.0, digits: int = 3) -> dict[str, float]:
        """Rounded, e.g. in points with scale 100."""
        return {k: round(scale * getattr(self, k), digits) for k in ("value", "low", "high")}


def bootstrap(values: Sequence[float] | Array, seed: int = 0, draws: int = DRAWS) -> Estimate:
    """Mean of per-item values; pass paired differences for a paired interval.

    Raises:
        ValueError: no value.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError("a mean of no values")
    rng = np.random.default_rng(seed)
    means = array[rng.integers(0, len(array), (draws, len(array)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(array.mean()), float(low), float(high))


def paired(ours: Sequence[float] | Array, theirs: Sequence[float] | Array, seed: int = 0) -> Estimate:
    """Mean difference `ours` - `theirs` over the same items."""
    return bootstrap(np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64), seed)
