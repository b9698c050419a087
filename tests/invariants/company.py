"""Runs requests alone and in company and compares every row of logits that they were sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.base_parity import recorded_logits
from morph import LLM, SamplingParams


@dataclass(frozen=True)
class Asked:
    """One greedy request of a test.

    Attributes:
        arrives: engine step at which it comes.
    """

    prompt: list[int]
    max_tokens: int
    layout: str
    arrives: int = 0

    @property
    def params(self) -> SamplingParams:
        """Greedy, of exactly `max_tokens` tokens."""
        return SamplingParams(max_tokens=self.max_tokens, layout=self.layout, ignore_eos=True)


@dataclass(frozen=True)
class Answer:
    """What came of a request: its layout, its tokens, and the logits `[tokens, vocab]` that they are the best of."""

    layout: str | None
    tokens: list[int]
    logits: torch.Tensor


def run(llm: LLM, asked: Sequence[Asked]) -> list[Answer]:
    """Answers to requests that share the engine, each joining at its step."""
    engine, blocks = llm.engine, llm.engine.config.num_blocks
    waiting = sorted(range(len(asked)), key=lambda i: asked[i].arrives)
    made = [engine.make_request(f"r{i}", one.prompt, one.params) for i, one in enumerate(asked)]
    step = 0
    with recorded_logits(engine) as rows:
        while waiting or not engine.idle:
            while waiting and asked[waiting[0]].arrives <= step:
                engine.add(made[waiting.pop(0)])
            engine.step()
            step += 1
            assert step < 5000, "the engine makes no progress"
    engine.check()
    return [
        Answer(None if (layout := r.layout(blocks)) is None else str(layout), r.answer, torch.stack(rows[r.id]))
        for r in made
    ]


@dataclass(frozen=True)
class Difference:
    """How far a request in company is from the same request alone.

    Attributes:
        logits: largest absolute difference between logits after equal tokens.
        margin: between the two likeliest tokens alone, where the tokens first differ; None = they never do.
    """

    logits: float
    margin: float | None


def difference(alone: Answer, together: Answer) -> Difference:
    """Compare up to the first token that differs; what follows it follows another text."""
    assert alone.layout == together.layout
    pairs = list(zip(alone.tokens, together.tokens, strict=True))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    end = len(pairs) if first is None else first + 1
    largest = float((alone.logits[:end] - together.logits[:end]).abs().max())
    if first is None:
        return Difference(largest, None)
    best = alone.logits[first].topk(2).values
    return Difference(largest, float(best[0] - best[1]))
