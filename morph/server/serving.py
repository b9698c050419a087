"""What all routes share, and the way from jobs to a response."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from morph.engine.params import RequestOutput
from morph.server.body import MAX_BODY_BYTES
from morph.server.budget import Budget
from morph.server.errors import ApiError
from morph.server.generation import Gate, Generation, Job, Update, failure_of, unless_gone
from morph.server.interface import ServedEngine
from morph.server.logprobs import Pieces
from morph.server.metrics import Metrics
from morph.server.recorder import Recorder
from morph.server.schema import GenerationBody
from morph.server.stream import EventStream, event


class Serving:
    """One engine as seen by the routes.

    Args:
        model_name: name that clients use; None = the engine's.
        max_body_bytes: larger request bodies are refused.
    """

    def __init__(
        self, engine: ServedEngine, model_name: str | None = None, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self.engine = engine
        self.model_name = model_name or engine.model_name
        self.max_body_bytes = max_body_bytes
        self.metrics = Metrics(engine)
        self.recorder = Recorder(engine)
        self.gate = Gate(engine)
        self.budget = Budget(engine)
        self.created = int(time.time())

    @cached_property
    def pieces(self) -> Pieces:
        """Token texts, for log probabilities."""
        return Pieces(self.engine.tokenizer)

    def check_model(self, name: str | None) -> None:
        """Raise 404 unless the name is the served model's."""
        if name is not None and name != self.model_name:
            message = f"no model {name!r} here; use {self.model_name!r}"
            raise ApiError(404, message, "model", "model_not_found")


class Shape(Protocol):
    """How one endpoint writes its answer."""

    request_id: str

    def full(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer."""
        ...

    def events(self, update: Update) -> bytes:
        """Stream events of what is new of one choice; empty when there is nothing to say yet."""
        ...

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The last chunk, when asked for."""
        ...


def new_id(prefix: str) -> str:
    """A response id, e.g. `cmpl-…`."""
    return f"{prefix}-{uuid.uuid4().hex}"


def usage(outputs: Sequence[RequestOutput], choices: int, answered: bool = True) -> dict[str, Any]:
    """The `usage` object; a prompt counts once, however many choices it has.

    Args:
        outputs: `choices` consecutive ones per prompt.
        answered: False when the answers were made only for the sake of the prompt's scores.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs[::choices])
    answer = sum(len(output.token_ids) for output in outputs) if answered else 0
    cached = sum(output.cached_tokens for output in outputs[::choices])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def morph_info(output: RequestOutput) -> dict[str, Any]:
    """The `morph` object of a response, to be merged into it; empty while the layout is undecided."""
    if output.layout is None:
        return {}
    info = {
        "layout": output.layout,
        "layout_source": output.layout_source,
        "attention_blocks": output.attention_blocks,
        "attention_budget": output.attention_budget,
        "predicted_loss": output.predicted_loss,
    }
    return {"morph": info}


async def respond(
    serving: Serving,
    request: Request,
    body: GenerationBody,
    jobs: Sequence[Job],
    shape: Shape,
    names: dict[str, str],
) -> Response:
    """Run the jobs and answer, streamed or whole.

    Raises:
        ApiError, InvalidRequest: before any part of an answer was sent.
        ClientGone: the client left; its sequences are aborted.
    """
    jobs = [replace(job, params=serving.budget.apply(job.params)) for job in jobs]
    observers = (serving.metrics, serving.recorder)
    generation = Generation(serving.engine, serving.gate, *observers, shape.request_id, jobs, not body.stream)
    if body.stream:
        await unless_gone(request, generation.__aenter__())
        return EventStream(_stream(generation, shape, body.include_usage), generation.close, names)

    async def run() -> list[RequestOutput]:
        async with generation:
            return await generation.collect()

    return JSONResponse(shape.full(await unless_gone(request, run())))


async def _stream(generation: Generation, shape: Shape, include_usage: bool) -> AsyncGenerator[bytes, None]:
    outputs: dict[int, RequestOutput] = {}
    while updates := await generation.updates():
        data = b""
        failure = None
        for update in updates:
            failure = failure_of(update.output)
            if failure is not None:
                break
            outputs[update.index] = update.output
            data += shape.events(update)
        if data:
            yield data
        if failure is not None:
            raise failure
    if include_usage:
        yield event(shape.usage_chunk([outputs[index] for index in sorted(outputs)]))
