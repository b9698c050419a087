"""Streams: the SSE format, the order of chunks, usage, and errors before and after the first byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from morph.server.app import create_app
from morph.server.stream import TextEvent, event
from tests.server.fake import ANSWER, FakeEngine

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Hi"}]


def events(response: httpx.Response) -> list[Any]:
    """Parsed events; asserts the framing."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    parts = response.text[:-2].split("\n\n")
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part[6:]) for part in parts[:-1]]


async def stream(client: httpx.AsyncClient, path: str, **fields: Any) -> list[Any]:
    response = await client.post(path, json={"model": "fake-1", "stream": True, **fields})
    assert response.status_code == 200, response.text
    return events(response)


async def test_a_chat_stream_is_role_then_text_then_finish(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, "/v1/chat/completions", messages=MESSAGES)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert deltas[-1] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_morph_is_on_the_first_chunk_and_on_the_last(client: httpx.AsyncClient) -> None:
    for path, fields in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "Hi"}),
    ):
        chunks = await stream(client, path, **fields)
        assert chunks[0]["morph"]["layout"] == chunks[-1]["morph"]["layout"] == "1001"
        assert all("morph" not in chunk for chunk in chunks[1:-1])


async def test_include_usage_adds_a_last_chunk_without_choices(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.cached_tokens = 2
    chunks = await stream(
        client,
        "/v1/chat/completions",
        messages=MESSAGES,
        max_tokens=3,
        stream_options={"include_usage": True},
    )
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert chunks[-1]["morph"]["layout"] == "1001"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_streamed_logprobs_are_those_of_the_whole_answer(client: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "logprobs": True, "top_logprobs": 1}
    whole = (await client.post("/v1/chat/completions", json={"model": "fake-1", **fields})).json()
    chunks = await stream(client, "/v1/chat/completions", **fields)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    joined = [item for piece in pieces if piece for item in piece["content"]]
    assert joined == whole["choices"][0]["logprobs"]["content"]


async def test_streamed_echo_and_logprobs_are_those_of_the_whole_answer(client: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {
        "prompt": "ab", "max_tokens": 5, "echo": True, "logprobs": 1, "morph": {"gate_tokens": 2},
    }  # fmt: skip
    whole = (await client.post("/v1/completions", json={"model": "fake-1", **fields})).json()["choices"][0]
    choices = [chunk["choices"][0] for chunk in await stream(client, "/v1/completions", **fields)]
    assert "".join(choice["text"] for choice in choices) == whole["text"] == "abHello"
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        joined = [item for choice in choices if choice["logprobs"] for item in choice["logprobs"][key]]
        assert joined == whole["logprobs"][key]


async def test_streams_of_several_choices_are_told_apart_by_index(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, "/v1/completions", prompt=["a", "b"], n=2, max_tokens=5)
    texts = {index: "" for index in range(4)}
    finishes = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finishes.append(choice["index"])
            assert chunk["morph"]["layout"] == "1001"
    assert texts == dict.fromkeys(range(4), "Hello")
    assert sorted(finishes) == [0, 1, 2, 3]


async def test_a_refused_request_is_a_plain_400_and_no_stream(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/v1/completions", json={"model": "fake-1", "prompt": "x", "stream": True, "max_tokens": 10_000}
    )
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


async def test_a_failure_in_mid_stream_is_an_error_event(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after, engine.delay = 3, 0.01
    chunks = await stream(client, "/v1/chat/completions", messages=MESSAGES)
    assert chunks[-1]["error"]["type"] == "server_error"
    assert "not finite" in chunks[-1]["error"]["message"]


async def test_a_dying_engine_is_an_error_event(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.die_after, engine.delay = 2, 0.01
    chunks = await stream(client, "/v1/chat/completions", messages=MESSAGES)
    assert chunks[-1]["error"]["code"] == "internal_error"
    assert (await client.get("/health")).status_code == 503


@pytest.mark.parametrize("text", ["a", "", ' "quoted" \\ ', "line\r\nend\n", "é漢🙂", "\u2028\x00\x1f", "data: [DONE]"])
def test_an_event_with_another_text_is_the_event_written_anew(text: str) -> None:
    def make(text: str) -> dict[str, Any]:
        return {"id": "x-1", "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None}], "usage": None}

    data = TextEvent(make, "text of x-1")(text)
    assert data == event(make(text))
    assert data.endswith(b"\n\n") and data.count(b"\n") == 2


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_all_text_chunks_have_the_same_fields(client: httpx.AsyncClient, path: str, usage: bool) -> None:
    fields: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": "Hi"}
    if usage:
        fields["stream_options"] = {"include_usage": True}
    chunks = [chunk for chunk in await stream(client, path, **fields) if chunk["choices"]]
    chat = "chat" in path
    first, *others = chunks[1:-1] if chat else chunks[:-1]
    first.pop("morph", None)
    for chunk in others:
        assert list(chunk) == list(first)
        assert list(chunk["choices"][0]) == list(first["choices"][0])
        assert {**chunk, "choices": 0} == {**first, "choices": 0}
        assert chunk["choices"][0]["finish_reason"] is chunk["choices"][0]["logprobs"] is None


async def serve_slowly(engine: FakeEngine, path: str, fields: dict[str, Any], seconds: float) -> list[Any]:
    """Events of a client whose connection takes `seconds` for each write."""
    sent: list[bytes] = []
    body = json.dumps({"model": "fake-1", "stream": True, **fields}).encode()
    asked = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if asked:
            return asked.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        await asyncio.sleep(seconds)
        sent.append(message.get("body", b""))

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [],
        "server": ("test", 80), "client": ("test", 1),
    }  # fmt: skip
    await create_app(engine)(scope, receive, send)  # type: ignore[arg-type]
    parts = b"".join(sent).decode().removesuffix("\n\n").split("\n\n")
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


async def test_tokens_that_wait_for_a_slow_client_share_a_chunk_in_order(engine: FakeEngine) -> None:
    fields = {"messages": MESSAGES, "n": 2, "stream_options": {"include_usage": True}}
    chunks = await serve_slowly(engine, "/v1/chat/completions", fields, 0.02)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: ANSWER, 1: ANSWER}
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] == ["stop"] * 2
    made = len(ANSWER.encode()) + 1
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * made
    assert len(chunks) < made


async def test_log_probabilities_of_tokens_that_share_a_chunk_are_complete(engine: FakeEngine) -> None:
    fields = {"prompt": "Hi", "max_tokens": 20, "logprobs": 1}
    chunks = await serve_slowly(engine, "/v1/completions", fields, 0.02)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert max(len(part["tokens"]) for part in parts) > 1
    assert [value for part in parts for value in part["token_logprobs"]] == [-0.5] * 20
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert offsets == sorted(offsets) and offsets[0] == 0


async def test_what_came_before_a_failure_is_sent_before_it(engine: FakeEngine) -> None:
    engine.fail_after = 6
    chunks = await serve_slowly(engine, "/v1/completions", {"prompt": "Hi"}, 0.0)
    assert "not finite" in chunks[-1]["error"]["message"]
    engine.fail_after, engine.die_after = None, 6
    chunks = await serve_slowly(engine, "/v1/completions", {"prompt": "Hi"}, 0.02)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == ANSWER[:6]
    assert chunks[-1]["error"]["code"] == "internal_error"
