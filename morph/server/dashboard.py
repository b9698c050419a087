"""The dashboard: one page at `/` with its files, a snapshot at `/morph/state`, a stream of them at `/morph/events`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.responses import Response

from morph.server.budget import Budget
from morph.server.errors import ApiError
from morph.server.interface import is_adaptive
from morph.server.recorder import INTERVAL_S, Recorder

FILES = {"dashboard.css": "text/css; charset=utf-8", "dashboard.js": "text/javascript; charset=utf-8"}
HEADERS = {
    # Nothing from elsewhere, no inline script: a model's answer shown on the page stays text.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def install(app: FastAPI, recorder: Recorder, model_name: str, budget: Budget) -> None:
    """Add the dashboard's routes; `app.state.closing`, once set, ends the streams of open pages."""
    engine = recorder.engine
    # Streams of the page never end by themselves; without this a server that stops would wait for them.
    closing = app.state.closing = asyncio.Event()

    def about() -> dict[str, Any]:
        return {
            "model": model_name,
            "blocks": engine.config.num_blocks,
            "block_kinds": list(engine.config.block_kinds),
            "adaptive": is_adaptive(engine),
            "gates": engine.has_gates,
            "budget": budget.value,
        }

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page."""
        return _file("index.html", "text/html; charset=utf-8")

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        """Its style and script."""
        if name not in FILES:
            raise ApiError(404, f"no file {name!r} here", code="not_found")
        return _file(name, FILES[name])

    @app.get("/morph/state")
    async def state() -> JSONResponse:
        """What the dashboard shows, now. Holds no prompt and no answer."""
        recorder.sample()
        return JSONResponse(about() | recorder.snapshot(), headers={"Cache-Control": "no-store"})

    @app.get("/morph/events")
    async def events(request: Request) -> StreamingResponse:
        """The same as server-sent events, twice a second; after the first only what is new of the history."""
        return StreamingResponse(
            _events(request, recorder, about, closing),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )


async def _events(request: Request, recorder: Recorder, about: Any, closing: asyncio.Event) -> AsyncIterator[bytes]:
    since = -1.0
    while not closing.is_set() and not await request.is_disconnected():
        recorder.sample()
        snapshot = about() | recorder.snapshot(since)
        since = snapshot["now"]
        yield f"data: {json.dumps(snapshot, separators=(',', ':'))}\n\n".encode()
        if not recorder.engine.alive:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing.wait(), INTERVAL_S)


def _file(name: str, media_type: str) -> Response:
    content = (resources.files("morph.server") / "static" / name).read_bytes()
    return Response(content, media_type=media_type, headers=HEADERS)
