"""Offline use: prompts in, answers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from morph.config import EngineConfig
from morph.engine.load import load_engine
from morph.engine.params import RequestOutput, SamplingParams, TokenLogprob
from morph.engine.request import Request
from morph.errors import InvalidRequest

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass(frozen=True)
class Score:
    """How likely a continuation is after its context.

    Attributes:
        logprob: sum over the continuation's tokens, nats.
        tokens: log probability of each token.
        is_greedy: every token is the likeliest one.
        layout: bit string that the context's gates (or the request) chose; the same for all its continuations.
    """

    logprob: float
    tokens: tuple[TokenLogprob, ...]
    is_greedy: bool
    layout: str


class LLM:
    """One model in this process.

    Args:
        model: name of a pulled model, a model folder, or a GGUF file.
        dtype: of weights and KV.
        options: further fields of `EngineConfig`.

    Example:
        >>> llm = LLM("smollm2-135m")
        >>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text
    """

    def __init__(
        self,
        model: str | Path,
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
        device: str = "cpu",
        **options: Any,
    ) -> None:
        from morph.hub import resolve_model

        loaded = load_engine(resolve_model(str(model)), EngineConfig(dtype=dtype, **options), device)
        self.engine = loaded.engine
        self.tokenizer = loaded.tokenizer
        self.model_name = loaded.name
        self.source = loaded.source
        self._count = 0

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer all prompts, batched; results in the order of the prompts.

        Args:
            prompts: one prompt or a list; each a string or a list of token ids.
            params: for all prompts, or one each.

        Raises:
            InvalidRequest: for any bad prompt or parameter, before anything runs.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many = cast(Sequence[Prompt], [prompts] if single else prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise InvalidRequest(f"{len(many)} prompts but {len(params)} params; give one each or one for all")
        requests = [
            self.engine.make_request(self._next_id(), self._tokens(prompt), one)
            for prompt, one in zip(many, params, strict=True)
        ]
        self._run(requests)
        return [request.output(self.engine.config.num_blocks) for request in requests]

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations (lists of `{"role", "content"}`) in the model's chat format."""
        single = len(conversations) > 0 and isinstance(conversations[0], dict)
        many = cast(Sequence[Sequence[Message]], [conversations] if single else conversations)
        prompts = [
            self.tokenizer.encode(
                self.tokenizer.apply_chat_template(list(c), tokenize=False, add_generation_prompt=True),
                add_special_tokens=False,
            )
            for c in many
        ]
        return self.generate(prompts, params)

    def score(
        self,
        contexts: Sequence[Prompt],
        continuations: Sequence[Sequence[Prompt]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[list[Score]]:
        """Log probability of each continuation after its context.

        Gates see the context only, so all continuations of one context share its layout.

        Args:
            contexts: at least one token each.
            continuations: for each context, one or more, at least one token each.
            params: `layout`, `attention_budget`, for all contexts or one each; sampling fields are ignored.
        """
        if len(contexts) != len(continuations):
            raise InvalidRequest(f"{len(contexts)} contexts but {len(continuations)} lists of continuations")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(contexts)
        if len(params) != len(contexts):
            raise InvalidRequest(f"{len(contexts)} contexts but {len(params)} params; give one each or one for all")
        rows: list[list[Request]] = []
        for context, many, base in zip(contexts, continuations, params, strict=True):
            rows.append([self._score_request(context, one, base) for one in many])
        self._run([request for row in rows for request in row])
        return [[self._score(request) for request in row] for row in rows]

    def _score_request(self, context: Prompt, continuation: Prompt, base: SamplingParams) -> Request:
        head = self._tokens(context)
        if not head:
            raise InvalidRequest("a context is empty; give at least one token", "contexts")
        if isinstance(context, str) and isinstance(continuation, str):
            whole = self._tokens(context + continuation)
            # The border may be tokenized differently when joined; the context's own tokens decide, so that all
            # continuations share them.
            tail = whole[len(head) :] if whole[: len(head)] == head else self._plain(continuation)
        else:
            tail = self._plain(continuation)
        if not tail:
            raise InvalidRequest(f"continuation {continuation!r} has no token", "continuations")
        params = replace(base, prompt_logprobs=1, gate_tokens=len(head), max_tokens=None)
        return self.engine.make_request(self._next_id(), head + tail, params, score_from=len(head) - 1)

    def _score(self, request: Request) -> Score:
        if request.error:
            raise RuntimeError(f"scoring failed: {request.error}")
        entries = tuple(e for e in (request.prompt_logprobs or []) if e is not None)
        layout = request.layout(self.engine.config.num_blocks)
        greedy = all(entry.top[0][0] == entry.token_id for entry in entries)
        return Score(sum(entry.logprob for entry in entries), entries, greedy, str(layout))

    def _tokens(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _plain(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else list(prompt)

    def _next_id(self) -> str:
        self._count += 1
        return f"local-{self._count}"

    def _run(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.add(request)
        try:
            while not self.engine.idle:
                self.engine.step()
        except BaseException:
            for request in requests:
                self.engine.abort(request.id)
            raise
        self.engine.check()
