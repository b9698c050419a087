"""One HTTP/1.1 request whose answer is read line by line, as an asyncio protocol.

The bytes that arrive are cut up in the callback that receives them: no coroutine wakes per line, so a streamed token
costs little CPU beside the server that it measures.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

OnLine = Callable[[bytes], bool]
"""Takes one line of a response body; True = no more are wanted."""


class RequestFailed(RuntimeError):
    """The server did not answer as the benchmark needs."""


class _Response(asyncio.Protocol):
    """Reads one HTTP response.

    Args:
        request: bytes to send.
        on_line: called with each line of the body of a response with status 200.

    Attributes:
        done: set once the response has ended or `on_line` has had enough; fails when either goes wrong.
        status: HTTP status, 0 before the head has come.
        body: what of the body is not a whole line yet; all of it when the status is not 200.
    """

    def __init__(self, request: bytes, on_line: OnLine) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.body = b""
        self._request = request
        self._on_line = on_line
        self._raw = b""
        self._chunked = False
        # Bytes of the body (or, when chunked, of the current chunk with its line end) that are still to come.
        self._left: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        if self.done.done():
            return
        try:
            self._raw += data
            if self.status or self._head():
                ended = self._read_chunks() if self._chunked else self._read_plain()
                if ended and not self.done.done():
                    self._end()
        except Exception as error:
            if not self.done.done():
                self.done.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        """The end of a body without a length; too early for any other."""
        if self.done.done():
            return
        if self.status and not self._chunked and self._left is None and error is None:
            self._end()
        else:
            self.done.set_exception(error or ConnectionError("the server closed the connection in mid-answer"))

    def _end(self) -> None:
        if self.status == 200 and self.body:
            self._on_line(self.body)
        self.done.set_result(None)

    def _head(self) -> bool:
        head, end, rest = self._raw.partition(b"\r\n\r\n")
        if not end:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.status, self._raw = int(first.split()[1]), rest
        self._chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        if not self._chunked and "content-length" in fields:
            self._left = int(fields["content-length"])
        return True

    def _read_plain(self) -> bool:
        data, self._raw = self._raw, b""
        if self._left is not None:
            self._left -= len(data)
        self._take(data)
        return self._left == 0

    def _read_chunks(self) -> bool:
        """Take all chunks that are whole; True after the last one."""
        raw, at = self._raw, 0
        ended = False
        while not ended:
            head_end = raw.find(b"\r\n", at)
            if head_end < 0:
                break
            begin = head_end + 2
            size = int(raw[at:head_end].partition(b";")[0], 16)
            if len(raw) < begin + size + 2:
                break
            self._take(raw[begin : begin + size])
            at, ended = begin + size + 2, size == 0
        self._raw = raw[at:]
        return ended

    def _take(self, data: bytes) -> None:
        if self.status != 200:
            self.body += data
            return
        *lines, self.body = (self.body + data).split(b"\n")
        for line in lines:
            if not self.done.done() and self._on_line(line):
                self.done.set_result(None)


async def exchange(
    url: str, method: str, path: str, on_line: OnLine, body: Any = None, api_key: str | None = None
) -> None:
    """One HTTP request; returns once the response has ended or `on_line` has had enough.

    Args:
        url: address that the path follows.
        on_line: called with each line of a body that comes with status 200, as it comes.
        body: sent as JSON.
        api_key: bearer token.

    Raises:
        RequestFailed: the status is not 200.
        OSError: no connection, or it broke.
    """
    parts = urlsplit(url)
    if not parts.hostname:
        raise RequestFailed(f"{url!r} names no host; write it as in http://127.0.0.1:8000")
    secure = parts.scheme == "https"
    payload = b"" if body is None else json.dumps(body).encode()
    head = [
        f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(payload)}",
    ]
    if api_key is not None:
        head.append(f"Authorization: Bearer {api_key}")
    request = "\r\n".join(head).encode() + b"\r\n\r\n" + payload
    transport, response = await asyncio.get_running_loop().create_connection(
        lambda: _Response(request, on_line),
        parts.hostname,
        parts.port or (443 if secure else 80),
        ssl=ssl.create_default_context() if secure else None,
    )
    try:
        await response.done
    finally:
        transport.close()
    if response.status != 200:
        answer = response.body.decode(errors="replace")[:500]
        raise RequestFailed(f"{method} {path} of {url} gave {response.status}: {answer}")
