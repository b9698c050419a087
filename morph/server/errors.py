"""Every failure as the OpenAI error object, with the right status."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from morph.errors import EngineDead, InvalidRequest, MorphError, OutOfMemory

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""Seconds that a refused client is told to wait."""


class ApiError(Exception):
    """An answer other than success.

    Args:
        status: HTTP status.
        message: names the field, its value and the remedy.
        param: the offending request field.
        code: machine-readable reason.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def type(self) -> str:
        """OpenAI's error family of the status."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The error as an HTTP response."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param, code)


def queue_full(message: str) -> ApiError:
    """A 429 that says when to come back."""
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})


def engine_dead(cause: object) -> ApiError:
    """A 503 for an engine that has stopped."""
    return ApiError(
        503, f"the engine has stopped ({cause or 'no cause known'}); restart the server", code="engine_dead"
    )


def as_api_error(error: BaseException, names: dict[str, str] | None = None) -> ApiError:
    """What to tell the client about an exception.

    Args:
        names: engine parameter -> request field, where the two differ.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        param = error.param
        return bad_request(str(error), (names or {}).get(param, param) if param else None)
    if isinstance(error, EngineDead):
        return engine_dead(error)
    if isinstance(error, OutOfMemory):
        return ApiError(503, str(error), code="out_of_memory", headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, MorphError):
        return ApiError(500, str(error), code="internal_error")
    log.error("unexpected error while serving a request", exc_info=error)
    return ApiError(500, f"internal error ({type(error).__name__}); see the server's log", code="internal_error")


def install(app: FastAPI) -> None:
    """Make the app answer every exception with an error object."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def on_gone(request: Request, error: Exception) -> JSONResponse:
        # Nobody reads this; 499 is what access logs call a client that left.
        return ApiError(499, "the client closed the connection", code="client_gone").response()

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if error.status_code == 404:
            return ApiError(404, f"no route {request.method} {path}; see /docs", code="unknown_route").response()
        if error.status_code == 405:
            message = f"{request.method} is not allowed on {path}"
            return ApiError(405, message, code="method_not_allowed", headers=dict(error.headers or {})).response()
        return ApiError(error.status_code, str(error.detail)).response()

    for kind in (ApiError, MorphError, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(ClientGone, on_gone)
    app.add_exception_handler(HTTPException, on_http)
