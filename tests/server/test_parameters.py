"""Every accepted request field reaches the engine as meant; every refused one says why."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio

CHAT = {"model": "fake-1", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "fake-1", "prompt": "Hi"}


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={**CHAT, **fields})


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={**TEXT, **fields})


@pytest.mark.parametrize(
    ("fields", "attribute", "expected"),
    [
        ({"max_tokens": 3}, "max_tokens", 3),
        ({"temperature": 0}, "temperature", 0),
        ({"temperature": 0.7}, "temperature", 0.7),
        ({}, "temperature", 1.0),
        ({"top_p": 0.9}, "top_p", 0.9),
        ({"top_k": 40}, "top_k", 40),
        ({"min_p": 0.05}, "min_p", 0.05),
        ({"seed": 7}, "seed", 7),
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": ["x", "yz"]}, "stop", ("x", "yz")),
        ({"stop": None}, "stop", ()),
        ({"stop_token_ids": [1, 2]}, "stop_token_ids", (1, 2)),
        ({"ignore_eos": True, "max_tokens": 2}, "ignore_eos", True),
        ({"presence_penalty": 0.5}, "presence_penalty", 0.5),
        ({"frequency_penalty": -0.5}, "frequency_penalty", -0.5),
        ({"repetition_penalty": 1.1}, "repetition_penalty", 1.1),
        ({"logit_bias": {"65": -5, "66": 2.5}}, "logit_bias", {65: -5, 66: 2.5}),
        ({"morph": {"layout": "0110"}}, "layout", "0110"),
        ({"morph": {"layout": "attention"}}, "layout", "attention"),
        ({"morph": {}}, "layout", "auto"),
        ({"morph": {"attention_budget": 0.25}}, "attention_budget", 0.25),
        ({"morph": {"cache_affinity": "auto"}}, "cache_affinity", "auto"),
        ({"morph": {"cache_affinity": 0.1}}, "cache_affinity", 0.1),
        ({"morph": {"gate_tokens": 2}}, "gate_tokens", 2),
    ],
)
@pytest.mark.parametrize("endpoint", [chat, complete])
async def test_a_field_reaches_the_engine(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    endpoint: Any,
    fields: dict[str, Any],
    attribute: str,
    expected: Any,
) -> None:
    response = await endpoint(client, **fields)
    assert response.status_code == 200, response.text
    assert getattr(engine.seen[0][1], attribute) == expected


async def test_defaults_of_max_tokens_are_those_of_openai(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await chat(client)
    await complete(client)
    assert [params.max_tokens for _, params in engine.seen] == [None, 16]


async def test_max_completion_tokens_is_max_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await chat(client, max_completion_tokens=4)
    assert response.json()["usage"]["completion_tokens"] == 4
    assert engine.seen[0][1].max_tokens == 4


async def test_choices_get_consecutive_seeds(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await chat(client, n=3, seed=2**64 - 1)
    assert [params.seed for _, params in engine.seen] == [2**64 - 1, 0, 1]


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me"},
        {"metadata": {"a": "b"}},
        {"store": True},
        {"service_tier": "auto"},
        {"parallel_tool_calls": True},
        {"tools": []},
        {"tools": None},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"best_of": 1},
        {"suffix": None},
        {"n": 2, "best_of": 2},
    ],
)
async def test_harmless_fields_are_accepted(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    response = await complete(client, **fields)
    assert response.status_code == 200, response.text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 513}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 9}, "n"),  # more than the queue holds
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": "a" * 1001}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": "7"}, "stop_token_ids"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": "yes"}, "stream"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "the end"}, "suffix"),
    ({"temprature": 0.5}, "temprature"),
    ({"morph": {"layuot": "auto"}}, "morph.layuot"),
    ({"morph": {"layout": "101"}}, "morph.layout"),
    ({"morph": {"layout": "10x1"}}, "morph.layout"),
    ({"morph": {"layout": ""}}, "morph.layout"),
    ({"morph": {"layout": 1001}}, "morph.layout"),
    ({"morph": {"attention_budget": 1.5}}, "morph.attention_budget"),
    ({"morph": {"attention_budget": -0.1}}, "morph.attention_budget"),
    ({"morph": {"attention_budget": "half"}}, "morph.attention_budget"),
    ({"morph": {"cache_affinity": -1}}, "morph.cache_affinity"),
    ({"morph": {"cache_affinity": "always"}}, "morph.cache_affinity"),
    ({"morph": {"gate_tokens": 0}}, "morph.gate_tokens"),
    ({"morph": {"gate_tokens": 1000}}, "morph.gate_tokens"),
    ({"morph": "auto"}, "morph"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("endpoint", [chat, complete])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_value_is_a_400_that_names_the_field(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    endpoint: Any,
    stream: bool,
    fields: dict[str, Any],
    param: str,
) -> None:
    if stream and "stream" not in fields and "stream_options" not in fields:
        fields = {**fields, "stream": True}
    response = await endpoint(client, **fields)
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.split(".")[-1] in error["message"] or param == "n"


async def test_an_unknown_morph_key_is_told_the_known_ones(client: httpx.AsyncClient) -> None:
    error = (await chat(client, morph={"budget": 1})).json()["error"]
    assert error["code"] == "unknown_parameter"
    assert "'morph.budget'" in error["message"]
    assert "layout, attention_budget, cache_affinity, gate_tokens" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": -4}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "content": "the template refuses this"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "long " * 200}]}, "messages"),
        ({"echo": True}, "echo"),
        ({"prompt": "x"}, "prompt"),
    ],
)
async def test_bad_chat_fields_are_400(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await chat(client, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, 258]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": ["x"] * 9}, "n"),
        ({"messages": []}, "messages"),
        ({"echo": True, "logprobs": 1}, "morph.gate_tokens"),
        ({"echo": True, "logprobs": 1, "morph": {"layout": "auto"}}, "morph.gate_tokens"),
    ],
)
async def test_bad_completion_fields_are_400(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await complete(client, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("missing", ["model", "messages"])
async def test_a_missing_field_is_named(client: httpx.AsyncClient, missing: str) -> None:
    body = {key: value for key, value in CHAT.items() if key != missing}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": f"{missing} is missing; give it",
        "type": "invalid_request_error",
        "param": missing,
        "code": "missing_required_parameter",
    }
