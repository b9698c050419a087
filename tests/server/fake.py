"""An engine without a model: scripted tokens behind the interface that the server uses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from morph.config import EngineConfig, ModelConfig, SSMConfig
from morph.engine.params import RequestOutput, SamplingParams, TokenLogprob
from morph.errors import InvalidRequest
from morph.layout import Layout

EOS = 257
ANSWER = "Hello, wörld! The answer is 42."


class ByteTokenizer:
    """Bytes are tokens; 256 begins a text, 257 ends an answer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [256] * add_special_tokens + list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        special = {256: "<s>", EOS: "</s>"}
        parts: list[bytes] = []
        for token in ids:
            if token < 256:
                parts.append(bytes([token]))
            elif not skip_special_tokens:
                parts.append(special[token].encode())
        return b"".join(parts).decode("utf-8", errors="replace")

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        if conversation[0]["role"] == "assistant":
            raise ValueError("a conversation must not begin with the assistant")
        text = "".join(f"[{m['role']}]{m['content']}\n" for m in conversation)
        return text + "[assistant]" * add_generation_prompt


@dataclass
class FakeEngine:
    """Answers every request with `answer`; the fields below change how."""

    answer: str = ANSWER
    delay: float = 0.0
    hold: bool = False  # no output at all while True
    fail_after: int | None = None  # tokens before finish_reason "error"
    die_after: int | None = None  # tokens before the stream raises
    cached_tokens: int = 0
    alive: bool = True
    error: str | None = None
    model_name: str = "fake-1"
    max_waiting: int = 8
    preemptions: int = 0
    seen: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=dict)

    @property
    def has_gates(self) -> bool:
        """Scripted layouts stand for gates."""
        return True

    def __post_init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.config = ModelConfig(
            vocab_size=258, hidden_size=8, intermediate_size=8, num_blocks=4, num_heads=2, num_kv_heads=1,
            head_dim=4, max_context=512, eos_token_ids=(EOS,), ssm=SSMConfig(),
        )  # fmt: skip
        self.engine_config = EngineConfig(max_waiting=self.max_waiting)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: set[str] = set()
        self._waiting: set[str] = set()

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self.alive = False

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        deliver: Callable[[RequestOutput | Exception], None],
        *,
        whole: bool = False,
    ) -> None:
        self._check(prompt, params)

        async def run() -> None:
            try:
                async for output in self.generate(prompt, params, request_id):
                    if output.finished or not whole:
                        deliver(output)
            except Exception as error:
                deliver(error)

        self._tasks[request_id] = asyncio.get_running_loop().create_task(run())

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self._tasks:
            self._tasks[request_id].cancel()

    def stats(self) -> dict[str, Any]:
        return {
            "running": len(self._running), "waiting": len(self._waiting), "prefilling": 0,
            "preemptions": self.preemptions, "units_total": 100, "units_free": 60, "units_attention": 30,
            "units_ssm": 10, "units_reserved": 5, "attention_share": 0.75, "distinct_layouts": 2,
        }  # fmt: skip

    def _check(self, prompt: list[int], params: SamplingParams) -> Layout:
        limit = self.config.max_context
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
        if len(prompt) >= limit:
            raise InvalidRequest(f"the prompt has {len(prompt)} tokens, the context is {limit}", "prompt")
        if params.max_tokens is not None and params.max_tokens > limit - len(prompt):
            raise InvalidRequest(f"max_tokens is {params.max_tokens}; use at most {limit - len(prompt)}", "max_tokens")
        bad = [token for token in prompt if not 0 <= token < self.config.vocab_size]
        if bad:
            raise InvalidRequest(f"token id {bad[0]} is outside the vocabulary of 258", "prompt")
        if params.gate_tokens is not None and params.gate_tokens > len(prompt):
            raise InvalidRequest(f"gate_tokens is {params.gate_tokens}", "gate_tokens")
        return Layout.parse("1001" if params.layout == "auto" else params.layout, self.config.num_blocks)

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        layout = self._check(ids, params)
        self.seen.append((ids, params))
        assert request_id is not None
        self._waiting.add(request_id)
        try:
            while self.hold:
                await asyncio.sleep(0.005)
            self._waiting.discard(request_id)
            self._running.add(request_id)
            async for output in self._tokens(ids, params, request_id, layout):
                yield output
        finally:
            self._waiting.discard(request_id)
            self._running.discard(request_id)

    async def _tokens(
        self, ids: list[int], params: SamplingParams, request_id: str, layout: Layout
    ) -> AsyncIterator[RequestOutput]:
        begin = time.perf_counter()
        first: float | None = None
        script = [*self.answer.encode(), EOS]
        limit = params.max_tokens or self.config.max_context - len(ids)
        sent_text = 0
        scored: list[TokenLogprob] = []
        auto = params.layout == "auto"
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            scores = [_score(token, params.prompt_logprobs) for token in ids[1:]]
            prompt_logprobs = [None, *scores]
        for count in range(1, limit + 1):
            await asyncio.sleep(self.delay)
            if self.die_after is not None and count > self.die_after:
                self.alive, self.error = False, "boom"
                raise RuntimeError("a bug")
            first = first or time.perf_counter() - begin
            tokens = [script[i % (len(script) - 1)] for i in range(count)] if params.ignore_eos else script[:count]
            text = self.tokenizer.decode(tokens)
            text = text.rstrip("\ufffd")
            reason: Any = None
            cut = min((text.find(stop) for stop in params.stop if stop in text), default=-1)
            if cut >= 0:
                text, reason = text[:cut], "stop"
            elif (tokens[-1] == EOS and not params.ignore_eos) or tokens[-1] in params.stop_token_ids:
                reason = "stop"
            elif count == limit:
                reason = "length"
            if self.fail_after is not None and count > self.fail_after:
                reason = "error"
            self.made[request_id] = count
            budget = 0.5 if params.attention_budget is None else params.attention_budget
            output = RequestOutput(
                request_id=request_id, prompt_token_ids=ids, text=text, token_ids=tokens,
                delta_text=text[sent_text:], delta_token_ids=tokens[-1:], finish_reason=reason,
                error="logits are not finite" if reason == "error" else None,
                layout=str(layout), layout_source="gate" if auto else "request",
                attention_budget=budget if auto else None,
                predicted_loss=0.25 if auto else None, cached_tokens=self.cached_tokens,
                ttft=first, e2e=time.perf_counter() - begin if reason else None, prompt_logprobs=prompt_logprobs,
            )  # fmt: skip
            if params.logprobs is not None:
                scored.append(_score(tokens[-1], params.logprobs))
                output.logprobs, output.delta_logprobs = list(scored), scored[-1:]
            sent_text = max(sent_text, len(text))
            yield output
            if reason:
                return


def _score(token: int, alternatives: int) -> TokenLogprob:
    top = tuple(((token + rank) % 256, -0.5 - rank) for rank in range(alternatives))
    return TokenLogprob(token, -0.5, top)
