"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from morph.engine.params import RequestOutput, TokenLogprob
from morph.errors import InvalidRequest
from morph.server.body import read_json
from morph.server.errors import as_api_error, bad_request
from morph.server.fields import parse
from morph.server.generation import Job, Update
from morph.server.interface import is_adaptive, text_of
from morph.server.logprobs import completion_logprobs
from morph.server.prompts import encode
from morph.server.schema import CompletionBody
from morph.server.serving import Serving, morph_info, new_id, respond, usage
from morph.server.stream import TextEvent, event

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for text completions."""


async def completions(serving: Serving, request: Request) -> Response:
    """Continue one or several texts."""
    body = parse(CompletionBody, await read_json(request, serving.max_body_bytes))
    serving.check_model(body.model)
    _check_scoring(body, is_adaptive(serving.engine))
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    # The engine always makes a token; a request for none is a request for the prompt's scores.
    score_only = bool(body.echo) and limit == 0
    try:
        params = [
            body.sampling(
                choice,
                max_tokens=1 if score_only else limit,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
            )
            for choice in range(body.choices)
        ]
        texts = body.prompts
        prompts = [await encode(serving.engine, text) for text in texts]
        jobs = [Job(prompt, one) for prompt in prompts for one in params]
        shape = CompletionShape(serving, body, texts, score_only)
        return await respond(serving, request, body, jobs, shape, body.renamed)
    except InvalidRequest as error:
        raise as_api_error(error, body.renamed) from None


def _check_scoring(body: CompletionBody, adaptive: bool) -> None:
    options = body.morph
    auto = options is None or options.layout in (None, "auto")
    told = options is not None and options.gate_tokens is not None
    if body.echo and body.logprobs is not None and adaptive and auto and not told:
        # Gates that see the text which is scored would choose the layout by the answer.
        raise bad_request(
            "echo with logprobs under layout 'auto' needs morph.gate_tokens, the number of leading tokens that are "
            "context; give it, or name a layout",
            "morph.gate_tokens",
            "missing_required_parameter",
        )


class CompletionShape:
    """Writes `text_completion` objects and chunks.

    Args:
        prompts: as given, one per `n` choices.
        score_only: the answers are dropped.
    """

    def __init__(
        self, serving: Serving, body: CompletionBody, prompts: Sequence[str | list[int]], score_only: bool
    ) -> None:
        self.request_id = new_id("cmpl")
        self._serving = serving
        self._body = body
        self._prompts = prompts
        self._score_only = score_only
        self._created = int(time.time())
        self._chars: dict[int, int] = {}
        self._layout_sent: set[int] = set()
        self._texts: dict[int, TextEvent] = {}

    def _head(self) -> dict[str, Any]:
        model = self._serving.model_name
        return {"id": self.request_id, "object": "text_completion", "created": self._created, "model": model}

    def full(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """A `text_completion`; `morph` is the first choice's, and stands in each choice when there are several."""
        choices = []
        for index, output in enumerate(outputs):
            update = Update(index, output, output.text, output.token_ids, output.logprobs or [])
            choice = self._choice(update)
            choices.append({**choice, **morph_info(output)} if len(outputs) > 1 else choice)
        return {**self._head(), "choices": choices, "usage": self._usage(outputs), **morph_info(outputs[0])}

    def events(self, update: Update) -> bytes:
        """At most one event; `morph` on the first one that knows the layout and on the last."""
        index, output = update.index, update.output
        if index in self._layout_sent and not output.finished and self._body.logprobs is None:
            return self._text_event(index)(update.text) if update.text and not self._score_only else b""
        choice = self._choice(update)
        if not choice["text"] and not choice["logprobs"] and not output.finished:
            return b""
        chunk = self._chunk(choice)
        if output.finished or (index not in self._layout_sent and output.layout is not None):
            self._layout_sent.add(index)
            chunk.update(morph_info(output))
        return event(chunk)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(), "choices": [choice]}
        return {**chunk, "usage": None} if self._body.include_usage else chunk

    def _text_event(self, index: int) -> TextEvent:
        if index not in self._texts:

            def make(text: str) -> dict[str, Any]:
                return self._chunk({"index": index, "text": text, "logprobs": None, "finish_reason": None})

            self._texts[index] = TextEvent(make, f"text of {self.request_id}")
        return self._texts[index]

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Without choices; carries `morph` when there is but one answer."""
        info = morph_info(outputs[0]) if len(outputs) == 1 else {}
        return {**self._head(), "choices": [], "usage": self._usage(outputs), **info}

    def _usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return usage(outputs, self._body.choices, answered=not self._score_only)

    def _choice(self, update: Update) -> dict[str, Any]:
        """What the update adds to its choice; the echo comes with the first one."""
        index, output = update.index, update.output
        text, ids = update.text, list(update.token_ids)
        entries: list[TokenLogprob | None] = list(update.logprobs)
        if self._score_only:
            text, ids, entries = "", [], []
        chars = self._chars.get(index)
        if chars is None:
            chars = 0
            if self._body.echo:
                given = self._prompts[index // self._body.choices]
                text = (given if isinstance(given, str) else text_of(self._serving.engine.tokenizer, given)) + text
                if self._body.logprobs is not None:
                    ids = output.prompt_token_ids + ids
                    entries = list(output.prompt_logprobs or []) + entries
        self._chars[index] = chars + len(text)
        logprobs = None
        if self._body.logprobs is not None and ids:
            logprobs = completion_logprobs(self._serving.pieces, ids, entries, chars)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}
