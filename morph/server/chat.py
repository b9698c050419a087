"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from morph.engine.params import RequestOutput
from morph.errors import InvalidRequest
from morph.server.body import read_json
from morph.server.errors import as_api_error
from morph.server.fields import parse
from morph.server.generation import Job, Update
from morph.server.logprobs import chat_logprobs
from morph.server.prompts import encode_chat
from morph.server.schema import ChatBody
from morph.server.serving import Serving, morph_info, new_id, respond, usage
from morph.server.stream import TextEvent, event


async def chat_completions(serving: Serving, request: Request) -> Response:
    """Answer a conversation."""
    body = parse(ChatBody, await read_json(request, serving.max_body_bytes))
    serving.check_model(body.model)
    try:
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = [body.sampling(i, max_tokens=body.limit, logprobs=logprobs) for i in range(body.choices)]
        prompt = await encode_chat(serving.engine, body.messages)
        jobs = [Job(prompt, one) for one in params]
        return await respond(serving, request, body, jobs, ChatShape(serving, body), body.names())
    except InvalidRequest as error:
        raise as_api_error(error, body.names()) from None


class ChatShape:
    """Writes `chat.completion` objects and chunks."""

    def __init__(self, serving: Serving, body: ChatBody) -> None:
        self.request_id = new_id("chatcmpl")
        self._serving = serving
        self._body = body
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._layout_sent: set[int] = set()
        self._texts: dict[int, TextEvent] = {}

    def _head(self, kind: str) -> dict[str, Any]:
        model = self._serving.model_name
        return {"id": self.request_id, "object": kind, "created": self._created, "model": model}

    def full(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """A `chat.completion`; `morph` is the first choice's, and stands in each choice when there are several."""
        choices = []
        for index, output in enumerate(outputs):
            choice = {
                "index": index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": self._logprobs(output.logprobs or []),
                "finish_reason": output.finish_reason,
            }
            choices.append({**choice, **morph_info(output)} if len(outputs) > 1 else choice)
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": usage(outputs, self._body.choices),
            **morph_info(outputs[0]),
        }

    def events(self, update: Update) -> bytes:
        """Role first, then text, then the finish; `morph` on the first one that knows the layout and on the last."""
        index, output = update.index, update.output
        if index in self._layout_sent and not output.finished and not self._body.logprobs:
            return self._text_event(index)(update.text) if update.text else b""
        result = []
        if index not in self._begun:
            self._begun.add(index)
            result.append(self._chunk(index, {"role": "assistant", "content": ""}))
        if update.text or (self._body.logprobs and update.logprobs):
            result.append(self._chunk(index, {"content": update.text}, self._logprobs(update.logprobs)))
        if output.finished:
            result.append({**self._chunk(index, {}, finish=output.finish_reason), **morph_info(output)})
        if index not in self._layout_sent and output.layout is not None and result:
            self._layout_sent.add(index)
            result[0].update(morph_info(output))
        return b"".join(map(event, result))

    def _text_event(self, index: int) -> TextEvent:
        if index not in self._texts:
            self._texts[index] = TextEvent(
                lambda text: self._chunk(index, {"content": text}), f"text of {self.request_id}"
            )
        return self._texts[index]

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Without choices; carries `morph` when there is but one answer."""
        info = morph_info(outputs[0]) if len(outputs) == 1 else {}
        counts = usage(outputs, self._body.choices)
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": counts, **info}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self._body.include_usage else chunk

    def _logprobs(self, entries: Sequence[Any]) -> dict[str, Any] | None:
        return chat_logprobs(self._serving.pieces, entries) if self._body.logprobs else None
