"""The HTTP application: routes only; each answers through its own module."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from morph.server import budget, dashboard, errors
from morph.server.body import MAX_BODY_BYTES, read_json
from morph.server.chat import chat_completions
from morph.server.completions import completions
from morph.server.fields import parse
from morph.server.interface import ServedEngine, max_context, text_of
from morph.server.keys import ApiKeys
from morph.server.prompts import encode_chat, encode_text
from morph.server.schema import DetokenizeBody, TokenizeBody
from morph.server.serving import Serving


def create_app(
    engine: ServedEngine,
    model_name: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    api_keys: tuple[str, ...] = (),
) -> FastAPI:
    """The application for a started engine; whoever started it stops it.

    Args:
        model_name: name that clients use; None = the engine's.
        max_body_bytes: larger request bodies are refused with 413.
        api_keys: what clients must show, see `morph.server.keys`; empty = everybody may ask.
    """
    serving = Serving(engine, model_name, max_body_bytes)
    app = FastAPI(title="Morph", description="OpenAI-compatible; see the docs for the `morph` object.")
    app.state.serving = serving
    errors.install(app)
    if api_keys:
        app.add_middleware(ApiKeys, keys=api_keys)

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while the engine runs, 503 once it has stopped."""
        if not engine.alive:
            return errors.engine_dead(engine.error).response()
        return JSONResponse({"status": "ok", "model": serving.model_name})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(serving.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [_model(serving)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        """One model."""
        serving.check_model(name)
        return JSONResponse(_model(serving))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await chat_completions(serving, request)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        """Continue a text."""
        return await completions(serving, request)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        """Token ids of a text or of a conversation."""
        body = parse(TokenizeBody, await read_json(request, max_body_bytes))
        serving.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise errors.bad_request("give either prompt or messages", "prompt")
        if body.prompt is not None:
            tokens = await encode_text(engine, body.prompt, body.add_special_tokens)
        else:
            tokens = await encode_chat(engine, body.messages or [], body.add_generation_prompt)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": max_context(engine)})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> JSONResponse:
        """Text of token ids, special tokens included."""
        body = parse(DetokenizeBody, await read_json(request, max_body_bytes))
        serving.check_model(body.model)
        size = engine.config.vocab_size
        for token in body.tokens:
            if not 0 <= token < size:
                raise errors.bad_request(f"token id {token} is outside the vocabulary of {size}", "tokens")
        return JSONResponse({"prompt": text_of(engine.tokenizer, body.tokens)})

    budget.install(app, serving.budget, max_body_bytes)
    dashboard.install(app, serving.recorder, serving.model_name, serving.budget)
    return app


def _model(serving: Serving) -> dict[str, Any]:
    engine = serving.engine
    return {
        "id": serving.model_name,
        "object": "model",
        "created": serving.created,
        "owned_by": "morph",
        "max_model_len": max_context(engine),
        "morph": {
            "blocks": engine.config.num_blocks,
            "block_kinds": list(engine.config.block_kinds),
            "attention_budget": serving.budget.value,
        },
    }
