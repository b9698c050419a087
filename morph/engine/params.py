"""What a caller asks of one request, checked where it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from morph.engine.grammar import Grammar
from morph.errors import InvalidRequest

LayoutSource = Literal["gate", "request", "cache"]
FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name} is {value!r}; use {allowed}", name)


@dataclass(frozen=True)
class SamplingParams:
    """How to decode one request, and which layout to run it with.

    Attributes:
        max_tokens: most tokens to make, >= 1. None = up to the context's end.
        temperature: 0 = greedy.
        top_k: 0 = off. top_p: 1 = off. min_p: 0 = off.
        seed: keys the counter RNG together with the position; None draws one per request.
        stop: strings that end the answer (not part of it). stop_token_ids: the same for tokens.
        ignore_eos: go on at the model's end token (benchmarks).
        repetition_penalty: > 1 makes tokens of prompt and answer less likely, 1 = off.
        presence_penalty, frequency_penalty: as in the OpenAI API, over the answer, -2…2.
        logit_bias: token id -> added logit, -100…100.
        logprobs: how many alternatives to report per answer token; None = none, 0 = the chosen token's only.
        prompt_logprobs: the same for prompt tokens (echo, scoring).
        layout: `auto`, `attention`, `ssm` or one character of 0 and 1 per block.
        attention_budget: 0…1; None = the engine's default. Used by `auto`.
        cache_affinity: 0 = exact; a tolerance or `auto` lets a request adopt a cached layout.
        cache_salt: requests with different salts share nothing in the context cache, so that timing tells tenants
            nothing of each other; None = the common namespace.
        gate_tokens: how many leading prompt tokens the gates may see; None = all.
        grammar: what the answer must match: JSON of a schema, a regular expression, a grammar.
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    layout: str = "auto"
    attention_budget: float | None = None
    cache_affinity: float | Literal["auto"] = 0.0
    cache_salt: str | None = None
    gate_tokens: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for name in ("max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "gate_tokens"):
            value = getattr(self, name)
            ok = value is None or (isinstance(value, int) and not isinstance(value, bool))
            _require(ok, name, value, "a whole number")
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        ):  # fmt: skip
            value = getattr(self, name)
            ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            _require(ok, name, value, "a finite number")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0 <= self.temperature <= 100, "temperature", self.temperature, "0 (greedy) to 100")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "a number above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "a number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "-2 to 2")
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit whole number")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"0 to {MAX_LOGPROBS}")
        _require(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "non-empty strings")
        _require(
            all(isinstance(t, int) and t >= 0 for t in self.stop_token_ids),
            "stop_token_ids", self.stop_token_ids, "token ids",
        )  # fmt: skip
        for token, bias in self.logit_bias.items():
            ok = isinstance(token, int) and token >= 0 and -100 <= bias <= 100
            _require(ok, "logit_bias", {token: bias}, "token ids with a bias from -100 to 100")
        _require(isinstance(self.layout, str), "layout", self.layout, "'auto', 'attention', 'ssm' or a bit string")
        budget = self.attention_budget
        ok = budget is None or (isinstance(budget, int | float) and not isinstance(budget, bool) and 0 <= budget <= 1)
        _require(ok, "attention_budget", budget, "a number from 0 to 1")
        affinity = self.cache_affinity
        ok = affinity == "auto" or (
            isinstance(affinity, int | float) and not isinstance(affinity, bool) and affinity >= 0
        )
        _require(ok, "cache_affinity", affinity, "0 (exact), a positive tolerance or 'auto'")
        salt = self.cache_salt
        _require(
            salt is None or (isinstance(salt, str) and bool(salt)), "cache_salt", salt, "a string that is not empty"
        )
        _require(self.gate_tokens is None or self.gate_tokens >= 1, "gate_tokens", self.gate_tokens, "at least 1")


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of one token under the model (before temperature), with the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class RequestOutput:
    """What one request has produced; `delta_*` is what is new since the last one handed out.

    Attributes:
        layout: bit string, block 0 first; None until prefill has decided every block.
        layout_source: `gate`, `request` or `cache`.
        predicted_loss: sum of the gates' utilities over the blocks that run ssm (nats per answer token).
        cached_tokens: prompt tokens served from the context cache.
        ttft, e2e: seconds since submission, None until known.
    """

    request_id: str
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    delta_text: str = ""
    delta_token_ids: list[int] = field(default_factory=list)
    delta_logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    layout: str | None = None
    layout_source: LayoutSource | None = None
    attention_budget: float | None = None
    predicted_loss: float | None = None
    cached_tokens: int = 0
    ttft: float | None = None
    e2e: float | None = None

    @property
    def finished(self) -> bool:
        """True once no more tokens will come."""
        return self.finish_reason is not None

    @property
    def attention_blocks(self) -> int | None:
        """Blocks that run attention, None until the layout is known."""
        return None if self.layout is None else self.layout.count("1")
