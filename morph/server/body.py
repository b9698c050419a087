"""Reading a JSON request body that may be too large, not UTF-8 or not JSON."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from fastapi import Request
from starlette.requests import ClientDisconnect

from morph.server.errors import ApiError, ClientGone, bad_request

MAX_BODY_BYTES = 8 * 2**20


async def read_json(request: Request, limit: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The body as a JSON object.

    Args:
        limit: most bytes; a larger body is refused before it is read to the end.

    Raises:
        ApiError: 413 too large; 400 not UTF-8, not JSON or not an object.
        ClientGone: the client left while sending.
    """
    return parse_json(await _read(request, limit))


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(declared, limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(f"more than {limit}", limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(chunks)


def _too_large(size: str, limit: int) -> ApiError:
    # The rest of the body stays unread, so the connection cannot be used again.
    message = f"the body has {size} bytes, the limit is {limit}; send less"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a body; see `read_json`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(
            f"the body is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; send JSON in UTF-8",
            code="invalid_utf8",
        ) from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # JSON can name half of a surrogate pair, which is no character and cannot be tokenized.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request(
            "the body has a lone surrogate (\\ud800 to \\udfff), which is not a character; escape whole pairs",
            code="invalid_utf8",
        ) from None
    except json.JSONDecodeError as error:
        raise bad_request(
            f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}",
            code="invalid_json",
        ) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body is a JSON {type(value).__name__}; send an object", code="invalid_json")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
