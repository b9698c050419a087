"""One request on its way through the engine."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Any

from morph.cache.context_cache import Hit
from morph.cache.tree import WIDTH, encode
from morph.engine.checkpoints import Checkpoint
from morph.engine.detokenizer import Detokenizer
from morph.engine.grammar import Constraint
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
        hit: where the prompt starts from in the context cache, while blocks still read from it.
        skipped: prompt tokens that were served from the cache in the last prefill.
        checkpoints: what this prefill leaves behind in the cache, by position.
        follows_gates: the hit was taken without knowing the layout; it may prove useless.
        leader: a request in prefill that will leave behind what this one can start from.
        sums_known: the running sums of the gates' features are those of all tokens.
        regret: what adopting cached bits against the gates has cost so far; `gate_bits` keeps the gates' own choices
            up to the first one that was not followed.
        score_from: position whose successor is the first scored token; None = a request that generates.
        prompt: the prompt's tokens; shared with all outputs and never changed.
        constraint: which tokens may come next, where the answer must match a grammar.
        penalised: logits are adjusted before a token is chosen.
        plain_greedy: the token is the likeliest one, and nothing else is asked.
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
    hit: Hit | None = None
    skipped: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list)
    follows_gates: bool = False
    leader: Request | None = None
    sums_known: bool = True
    regret: float = 0.0
    gate_bits: list[bool] | None = None
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    counts: dict[int, int] = field(default_factory=dict)
    constraint: Constraint | None = None
    arrival: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    finished_at: float | None = None
    sent_tokens: int = 0
    sent_text: int = 0
    sent_logprobs: int = 0

    def __post_init__(self) -> None:
        params = self.params
        self.prompt = self.tokens[: self.prompt_len]
        self._path = encode(self.prompt)
        self.penalised = bool(
            self.constraint is not None
            or params.logit_bias
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
        )
        self.plain_greedy = params.temperature == 0 and not self.penalised and params.logprobs is None
        self._decided: tuple[str, float | None] | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and answer tokens."""
        return len(self.tokens)

    @property
    def namespace(self) -> str:
        """Requests of different namespaces see nothing of each other in the cache."""
        return self.params.cache_salt or ""

    def path(self, tokens: int | None = None) -> bytes:
        """The first tokens (all, when not said) as the cache's tree has them."""
        known = len(self._path) // WIDTH
        if known < len(self.tokens):
            self._path += encode(self.tokens[known:])
        return self._path if tokens is None else self._path[: tokens * WIDTH]

    @property
    def rows(self) -> int:
        """Tokens that prefill computes: those that are not in memory."""
        return len(self.tokens) - self.cached

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

    def decided(self, num_blocks: int) -> tuple[str, float | None] | None:
        """The complete layout's bits and its predicted loss, or None while blocks are undecided."""
        # Kept, because a layout never changes once it is complete and every step's output has it.
        if self._decided is None and (layout := self.layout(num_blocks)) is not None:
            loss = None
            if len(self.utilities) == num_blocks:
                loss = float(sum(u for u, bit in zip(self.utilities, layout, strict=True) if not bit))
            self._decided = (str(layout), loss)
        return self._decided

    def output(self, num_blocks: int) -> RequestOutput:
        """Everything so far, with what is new since the last call as deltas."""
        layout, loss = self.decided(num_blocks) or (None, None)
        answer = self.answer
        text = self.detokenizer.text
        out = RequestOutput(
            request_id=self.id,
            prompt_token_ids=self.prompt,
            text=text,
            token_ids=answer,
            delta_text=text[self.sent_text :],
            delta_token_ids=answer[self.sent_tokens :],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            layout=layout,
            layout_source=self.layout_source if layout is not None else None,
            attention_budget=self.budget,
            predicted_loss=loss,
            ttft=None if self.first_token is None else self.first_token - self.arrival,
            e2e=None if self.finished_at is None else self.finished_at - self.arrival,
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.skipped,
        )
        if self.params.logprobs is not None:
            out.logprobs = list(self.logprobs)
            out.delta_logprobs = self.logprobs[self.sent_logprobs :]
        self.sent_text, self.sent_tokens, self.sent_logprobs = len(text), len(answer), len(self.logprobs)
        return out
