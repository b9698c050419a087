"""`response_format`, `morph.regex` and `morph.grammar` become the engine's grammar, or a clear refusal."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from morph.engine.grammar import Grammar
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT = {"model": "fake-1", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_schema({"type": "object"})),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Grammar("json", json.dumps(SCHEMA), "response_format"),
        ),
        ({"morph": {"regex": "[a-z]+"}}, Grammar("regex", "[a-z]+", "morph.regex")),
        ({"morph": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"', "morph.grammar")),
    ],
)
async def test_formats_become_grammars(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], wanted: Grammar | None
) -> None:
    assert (await client.post("/v1/chat/completions", json={**CHAT, **fields})).status_code == 200
    body = {"model": "fake-1", "prompt": "Hi", **fields}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert [params.grammar for _, params in engine.seen] == [wanted, wanted]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "morph": {"regex": "a"}}, "response_format"),
        ({"morph": {"regex": 5}}, "morph.regex"),
    ],
)
async def test_bad_formats_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and engine.seen == []
