"""Over a real socket: clients that leave or read slowly, the openai client, and the server process."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable

import httpx
import openai
import pytest

from tests.server.conftest import LiveServer
from tests.server.fake import ANSWER

CHAT = {"model": "fake-1", "messages": [{"role": "user", "content": "Hi"}]}


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_a_client_that_leaves_mid_stream_aborts_its_request(live: LiveServer) -> None:
    live.engine.delay = 0.02
    with (
        httpx.Client(base_url=live.url) as client,
        client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
    ):
        next(response.iter_lines())
    wait_for(lambda: len(live.engine.aborted) == 1)
    made = sum(live.engine.made.values())
    assert made < len(ANSWER)
    time.sleep(0.1)
    assert sum(live.engine.made.values()) == made, "tokens are still being made"
    assert live.engine.stats()["running"] == 0


@pytest.mark.parametrize(("stream", "hold"), [(False, False), (False, True), (True, True)])
def test_a_client_that_leaves_before_the_answer_aborts_its_request(live: LiveServer, stream: bool, hold: bool) -> None:
    live.engine.delay, live.engine.hold = 0.05, hold
    with httpx.Client(base_url=live.url) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json={**CHAT, "n": 2, "stream": stream}, timeout=0.2)
    wait_for(lambda: len(live.engine.aborted) == 2)
    wait_for(lambda: live.engine.stats()["running"] == live.engine.stats()["waiting"] == 0)
    live.engine.delay, live.engine.hold = 0, False
    assert httpx.post(live.url + "/v1/chat/completions", json=CHAT).status_code == 200


def test_a_client_that_does_not_read_stalls_nobody(live: LiveServer) -> None:
    live.engine.answer = "x" * 400
    body = json.dumps({**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 8}).encode()
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        slow.sendall(head.encode() + body)
        # The engine finishes the answers although nobody reads them, and serves others meanwhile.
        wait_for(lambda: sum(live.engine.made.values()) == 8 * 401)
        wait_for(lambda: live.engine.stats()["running"] == 0)
        assert httpx.post(live.url + "/v1/chat/completions", json={**CHAT, "max_tokens": 3}).status_code == 200


def test_many_streams_at_once_keep_apart(live: LiveServer) -> None:
    live.engine.delay = 0.001

    async def one(client: httpx.AsyncClient, tokens: int) -> str:
        text = ""
        body = {**CHAT, "stream": True, "max_tokens": tokens}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        return text

    async def all_of_them() -> list[str]:
        async with httpx.AsyncClient(base_url=live.url) as client:
            return await asyncio.gather(*(one(client, tokens) for tokens in range(1, 8)))

    assert asyncio.run(all_of_them()) == [ANSWER[:tokens] for tokens in range(1, 8)]


@pytest.fixture
def client(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)


def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake-1",
        messages=[{"role": "user", "content": "Hi"}],
        max_completion_tokens=6,
        logprobs=True,
        top_logprobs=1,
        extra_body={"morph": {"layout": "attention"}},
    )
    assert answer.choices[0].message.content == "Hello,"
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert answer.choices[0].logprobs.content[0].token == "H"
    assert answer.usage and answer.usage.completion_tokens == 6
    assert answer.model_extra and answer.model_extra["morph"]["layout"] == "1111"


def test_openai_conversation_can_be_sent_back(client: openai.OpenAI) -> None:
    messages: list = [{"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(model="fake-1", messages=messages)
    messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
    assert client.chat.completions.create(model="fake-1", messages=messages).choices[0].message.content == ANSWER


def test_openai_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake-1",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, layouts = "", None, []
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
        if chunk.model_extra and "morph" in chunk.model_extra:
            layouts.append(chunk.model_extra["morph"]["layout"])
    assert text == ANSWER
    assert usage and usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens == 0
    assert layouts == ["1001"] * 3


def test_openai_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-1", prompt=["a", "b"], max_tokens=5, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.tokens == list("Hello")
    stream = client.completions.create(model="fake-1", prompt="a", max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello"


def test_openai_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake-1"]
    assert client.models.retrieve("fake-1").owned_by == "morph"


def test_openai_raises_its_own_errors(client: openai.OpenAI, live: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match=r"morph\.layuot") as bad:
        client.completions.create(model="fake-1", prompt="a", extra_body={"morph": {"layuot": "auto"}})
    assert bad.value.param == "morph.layuot"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    live.engine.fail_after, live.engine.delay = 2, 0.01
    with pytest.raises(openai.APIError, match="not finite"):
        for _ in client.completions.create(model="fake-1", prompt="a", stream=True):
            pass


def test_openai_client_that_closes_its_stream_aborts(client: openai.OpenAI, live: LiveServer) -> None:
    live.engine.delay = 0.02
    stream = client.chat.completions.create(model="fake-1", messages=[{"role": "user", "content": "Hi"}], stream=True)
    next(iter(stream))
    stream.close()
    wait_for(lambda: len(live.engine.aborted) == 1)
