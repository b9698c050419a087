"""Whatever arrives is answered with an OpenAI error object and the right status."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.server.fake import ANSWER, FakeEngine

pytestmark = pytest.mark.anyio

TEXT = {"model": "fake-1", "prompt": "Hi"}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b'{"model": "fake-1", ', "invalid_json"),
        (b"[1, 2]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b'{"prompt": NaN}', "invalid_json"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[" * 90_000, "invalid_json"),
        (b'{"model": "fake-1", "prompt": "\xff\xfe"}', "invalid_utf8"),
        (b'{"model": "fake-1", "prompt": "\\ud800"}', "invalid_utf8"),
    ],
    ids=["empty", "cut", "list", "string", "nan", "digits", "deep", "utf8", "surrogate"],
)
async def test_a_body_that_is_no_json_object_is_400(
    client: httpx.AsyncClient, path: str, body: bytes, code: str
) -> None:
    error = error_of(await client.post(path, content=body, headers={"content-type": "application/json"}), 400)
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"


async def test_whole_surrogate_pairs_are_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = b'{"model": "fake-1", "prompt": "\\ud83d\\ude00"}'
    assert (await client.post("/v1/completions", content=body)).status_code == 200
    assert bytes(engine.seen[0][0][1:]).decode() == "\U0001f600"


async def test_a_large_body_is_413_with_and_without_a_declared_length(client: httpx.AsyncClient) -> None:
    body = b'{"model": "fake-1", "prompt": "' + b"x" * 100_000 + b'"}'

    async def pieces() -> Any:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    for content in (body, pieces()):
        error = error_of(await client.post("/v1/completions", content=content), 413)
        assert error["code"] == "body_too_large"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_unknown_model_is_404(client: httpx.AsyncClient, path: str) -> None:
    body = {"model": "gpt-9", "prompt": "x"} if path == "/v1/completions" else {"model": "gpt-9", "messages": []}
    error = error_of(await client.post(path, json=body), 404)
    assert error["code"] == "model_not_found"
    assert "'fake-1'" in error["message"]
    error_of(await client.get("/v1/models/gpt-9"), 404)


async def test_an_unknown_route_is_404_and_a_wrong_method_405(client: httpx.AsyncClient) -> None:
    assert error_of(await client.get("/v1/nothing"), 404)["code"] == "unknown_route"
    response = await client.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


async def test_a_full_queue_is_429_with_retry_after(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.hold = True
    waiting = [asyncio.create_task(client.post("/v1/completions", json=TEXT)) for _ in range(engine.max_waiting)]
    await asyncio.sleep(0.1)
    response = await client.post("/v1/completions", json=TEXT)
    assert error_of(response, 429)["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) >= 1
    engine.hold = False
    assert [(await task).status_code for task in waiting] == [200] * engine.max_waiting
    assert (await client.post("/v1/completions", json=TEXT)).status_code == 200


async def test_a_dead_engine_is_503(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.alive, engine.error = False, "boom"
    error = error_of(await client.post("/v1/completions", json=TEXT), 503)
    assert error["type"] == "server_error"
    assert error["code"] == "engine_dead"


async def test_a_request_that_the_engine_gives_up_is_500(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after = 0
    assert "not finite" in error_of(await client.post("/v1/completions", json=TEXT), 500)["message"]


async def test_an_unexpected_error_is_500_and_tells_no_internals(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.die_after = 0
    error = error_of(await client.post("/v1/completions", json=TEXT), 500)
    assert error["message"] == "internal error (RuntimeError); see the server's log"


async def test_one_bad_sequence_of_several_refuses_the_request_and_leaves_none_running(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.delay = 0.05
    error_of(await client.post("/v1/completions", json={**TEXT, "prompt": ["a", "b" * 600, "c"]}), 400)
    # The third was never submitted.
    assert [name.rpartition("-")[2] for name in engine.aborted] == ["0"]
    await asyncio.sleep(0)
    stats = engine.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "text": "a"}, "text"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
async def test_bad_tokenize_requests_are_400(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    assert error_of(await client.post(path, json=body), 400)["param"] == param


async def test_no_prompt_text_is_logged(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "morph")
    for fields in ({}, {"max_tokens": -1}, {"stream": True}):
        await client.post("/v1/completions", json={"model": "fake-1", "prompt": "secret words", **fields})
    engine.die_after = 0
    await client.post("/v1/completions", json={"model": "fake-1", "prompt": "secret words"})
    assert "secret" not in caplog.text
    assert ANSWER[:5] not in caplog.text
    assert "13 prompt (0 cached) + 16 answer tokens" in caplog.text
