"""One request on its way through the engine."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Any

from morph.engine.detokenizer import Detokenizer
from morph.engine.params import FinishReason, LayoutSource, RequestOutput, SamplingParams, TokenLogprob
from morph.layout import Layout


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """State of one request; only the engine thread touches it.

    Attributes:
        tokens: prompt and answer so far.
        prompt_len: tokens of the prompt.
        order: arrival number; the youngest has the largest.
        bits: decisions so far, block 0 first; kept through preemption. Complete = the layout.
        slot: row of the page tables while it holds memory.
        cached: tokens whose keys, values and states are in memory (positions 0…cached-1).
        reserved: units promised for blocks that are not decided yet.
        score_from: position whose successor is the first scored token; None = a request that generates.
    """

    id: str
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    order: int
    seed: int
    max_tokens: int
    detokenizer: Detokenizer
    fixed: Layout | None = None
    budget: float | None = None
    policy: Any = None
    carry: Any = None
    gate_tokens: int = 0
    priority: int = 0
    score_from: int | None = None
    bits: list[bool] = field(default_factory=list)
    utilities: list[float] = field(default_factory=list)
    layout_source: LayoutSource = "request"
    status: Status = Status.WAITING
    slot: int = -1
    cached: int = 0
    reserved: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    counts: dict[int, int] = field(default_factory=dict)
    arrival: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    finished_at: float | None = None
    sent_tokens: int = 0
    sent_text: int = 0
    sent_logprobs: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and answer tokens."""
        return len(self.tokens)

    @property
    def answer(self) -> list[int]:
        """Tokens made so far."""
        return self.tokens[self.prompt_len :]

    @property
    def finished(self) -> bool:
        """True when no more tokens will come."""
        return self.status is Status.FINISHED

    def layout(self, num_blocks: int) -> Layout | None:
        """The complete layout, or None while blocks are undecided."""
        if self.fixed is not None:
            return self.fixed
        return Layout.from_bits(self.bits) if len(self.bits) == num_blocks else None

    def output(self, num_blocks: int) -> RequestOutput:
        """Everything so far, with what is new since the last call as deltas."""
        layout = self.layout(num_blocks)
        answer = self.answer
        text = self.detokenizer.text
        out = RequestOutput(
            request_id=self.id,
            prompt_token_ids=self.tokens[: self.prompt_len],
            text=text,
            token_ids=answer,
            delta_text=text[self.sent_text :],
            delta_token_ids=answer[self.sent_tokens :],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            layout=str(layout) if layout is not None else None,
            layout_source=self.layout_source if layout is not None else None,
            attention_budget=self.budget,
            ttft=None if self.first_token is None else self.first_token - self.arrival,
            e2e=None if self.finished_at is None else self.finished_at - self.arrival,
            prompt_logprobs=self.prompt_logprobs,
        )
        if self.params.logprobs is not None:
            out.logprobs = list(self.logprobs)
            out.delta_logprobs = self.logprobs[self.sent_logprobs :]
        if layout is not None and len(self.utilities) == num_blocks:
            out.predicted_loss = float(sum(u for u, bit in zip(self.utilities, layout, strict=True) if not bit))
        self.sent_text, self.sent_tokens, self.sent_logprobs = len(text), len(answer), len(self.logprobs)
        return out
