"""API keys: who may ask. The page and the health check are open, everything else wants a key where there are any."""

from __future__ import annotations

import hmac
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from morph.errors import InvalidRequest
from morph.server.errors import ApiError

OPEN = ("/", "/health")
OPEN_BELOW = "/dashboard/"
SHORTEST = 8


def read_keys(file: Path | None, variable: str | None) -> tuple[str, ...]:
    """Keys of a file, one a line (empty lines and `#` comments left out), and of a comma-separated variable.

    Raises:
        InvalidRequest: a file that cannot be read or holds none, or a key too short to be one.
    """
    keys: list[str] = []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the API keys in {file} cannot be read ({error})") from error
        keys += [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not keys:
            raise InvalidRequest(f"{file} holds no API key; write one a line, or leave the option out")
    keys += [word.strip() for word in (variable or "").split(",") if word.strip()]
    short = [number for number, key in enumerate(keys, 1) if len(key) < SHORTEST]
    if short:
        raise InvalidRequest(f"API key {short[0]} has fewer than {SHORTEST} characters; use a longer one")
    return tuple(keys)


class ApiKeys:
    """ASGI middleware that answers 401 to requests without a known key.

    Args:
        keys: accepted after `Authorization: Bearer`, all alike.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before its body is read."""
        if scope["type"] != "http" or self._is_open(scope["path"]) or self._knows(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            401,
            "no valid API key; send one as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
        )
        await error.response()(scope, receive, send)

    @staticmethod
    def _is_open(path: str) -> bool:
        return path in OPEN or path.startswith(OPEN_BELOW)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # All are compared, so that the time tells nothing.
        word = given.strip().encode()
        return sum(hmac.compare_digest(word, key) for key in self._keys) > 0
