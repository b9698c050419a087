"""API keys, and the budget that changes while the server runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from morph.errors import InvalidRequest
from morph.server.app import create_app
from morph.server.keys import read_keys
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio
CHAT = {"model": "fake-1", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
async def locked(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, api_keys=("first-key", "second-key"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        yield http


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong-key", "Bearer", "first-key", "Basic first-key", "Bearer first-key2"]
)
async def test_without_a_key_nothing_runs(locked: httpx.AsyncClient, engine: FakeEngine, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        answer = await locked.post(path, json=CHAT, headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/metrics", "/morph/state", "/morph/events", "/morph/budget", "/docs", "/openapi.json"):
        assert (await locked.get(path, headers=headers)).status_code == 401
    assert (await locked.put("/morph/budget", json={"attention_budget": 0}, headers=headers)).status_code == 401
    assert engine.seen == []


@pytest.mark.parametrize("key", ["first-key", "second-key"])
async def test_each_key_opens_and_the_page_is_open(locked: httpx.AsyncClient, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    assert (await locked.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
    for path in ("/", "/health", "/dashboard/dashboard.js"):
        assert (await locked.get(path)).status_code == 200


def test_keys_are_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst-key\n\n second-key \n")
    assert read_keys(file, "third-key, fourth-key") == ("first-key", "second-key", "third-key", "fourth-key")
    assert read_keys(None, None) == ()
    with pytest.raises(InvalidRequest, match="fewer than 8 characters"):
        read_keys(None, "short")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_keys(tmp_path / "none", None)
    file.write_text("# nothing\n")
    with pytest.raises(InvalidRequest, match="holds no API key"):
        read_keys(file, None)


async def test_the_budget_changes_for_requests_that_name_none(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.get("/morph/budget")).json() == {"attention_budget": 0.5}
    answer = await client.put("/morph/budget", json={"attention_budget": 0.2})
    assert answer.json() == {"attention_budget": 0.2}
    for morph in ({}, {"attention_budget": 0.9}, {"layout": "ssm"}):
        assert (await client.post("/v1/chat/completions", json={**CHAT, "morph": morph})).status_code == 200
    assert [params.attention_budget for _, params in engine.seen] == [0.2, 0.9, None]
    assert (await client.get("/morph/state")).json()["budget"] == 0.2


@pytest.mark.parametrize(
    "body", [{"attention_budget": 1.5}, {"attention_budget": "x"}, {}, {"attention_budget": 1, "b": 2}]
)
async def test_a_bad_budget_is_refused_and_changes_nothing(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    answer = await client.put("/morph/budget", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert (await client.get("/morph/budget")).json() == {"attention_budget": 0.5}
