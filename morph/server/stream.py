"""Server-sent events: one JSON object per event, `[DONE]` at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from morph.server.errors import as_api_error

DONE = b"data: [DONE]\n\n"

# `json.dumps` with options makes an encoder for each call.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + _encode(data).encode() + b"\n\n"


class TextEvent:
    """An event that is sent again and again with another text: only the text is encoded each time.

    Args:
        make: the event's object for a text.
        mark: a text that the object does not contain otherwise.
    """

    def __init__(self, make: Callable[[str], dict[str, Any]], mark: str) -> None:
        self._head, self._tail = event(make(mark)).split(_encode(mark).encode())

    def __call__(self, text: str) -> bytes:
        """The event with this text."""
        return self._head + _encode(text).encode() + self._tail


class EventStream(Response):
    """Sends events as they come; ends at once when the client leaves.

    A failure in mid-stream, when the status is out already, becomes an event with an error object.

    Args:
        events: one or more whole events each.
        close: called when the stream ends for any reason, also when it never began.
        names: engine parameter -> request field, for errors.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        names: dict[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream (ASGI)."""
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                # A client that vanished between two writes shows up as OSError.
                with contextlib.suppress(OSError):
                    sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._events.aclose()
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except OSError:
            raise
        except Exception as error:
            data = event(as_api_error(error, self._names).body())
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
