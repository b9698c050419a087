"""What an evaluation consists of: options, sets with their prompts, finished items."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from morph.config import ModelConfig
from morph.evaluate.datasets import Dataset
from morph.evaluate.items import Item
from morph.evaluate.layouts import Requests, Spec
from morph.evaluate.store import Record

ANSWER_WEIGHT = 8
"""Work of an answer token in prompt tokens, for the time left."""


@dataclass(frozen=True)
class Options:
    """What `morph eval` was asked for.

    Attributes:
        suite: a name of `SUITES`. datasets: some sets only, or others.
        layouts: comma-separated specs; None = the suite's default.
        data: folder of local sets. hub: read sets from the hub.
        out: folder of results. limit: items at most of each set.
        lengths: range of the long forms in tokens; None = the suite's.
        ranking: blocks, most sensitive first, as text or a file; None = recorded, else measured.
        answer_loss: score the base's answer under every layout too.
        group_tokens: prompt tokens that are handed to the engine together, and kept together; None = by `max_requests`.
    """

    model: str
    suite: str = "quick"
    datasets: tuple[str, ...] = ()
    layouts: str | None = None
    data: Path | None = None
    hub: bool = False
    out: Path = Path("eval")
    limit: int | None = None
    lengths: tuple[int, int] | None = None
    ranking: str | None = None
    longest: int | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: str = "cpu"
    max_requests: int = 16
    memory_bytes: int | None = None
    seed: int = 0
    answer_loss: bool = False
    group_tokens: int | None = None

    @property
    def group_size(self) -> int:
        """`group_tokens`, or enough to keep the engine's places filled."""
        return self.group_tokens or 1536 * self.max_requests


@dataclass
class Part:
    """One set, ready to run.

    Attributes:
        prompts: token ids of each item's prompt. saved: c_l(n), `[items, blocks]`.
    """

    dataset: Dataset
    items: list[Item]
    prompts: list[list[int]]
    requests: Requests

    def weight(self, index: int) -> float:
        """Work of one item under one layout, in prompt tokens, about."""
        item, length = self.items[index], len(self.prompts[index])
        return float(length * max(1, len(item.choices)) + ANSWER_WEIGHT * item.max_tokens)


@dataclass
class Evaluation:
    """What was run.

    Attributes:
        records: finished items by set, layout name and item id.
        left_out: items that did not fit the context, by set.
    """

    options: Options
    config: ModelConfig
    about: dict[str, Any]
    specs: list[Spec]
    parts: list[Part]
    records: dict[str, dict[str, dict[str, Record]]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    oracle_items: int = 0
    ranking: list[int] | None = None


def item_digest(item: Item, prompt: Sequence[int]) -> str:
    """Short digest of all that an item's record depends on beside the layout: prompt, choices, references, limits."""
    asked = (list(prompt), item.choices, item.gold, item.references, item.max_tokens, item.stop, item.score)
    return hashlib.sha1(repr(asked).encode()).hexdigest()[:12]
