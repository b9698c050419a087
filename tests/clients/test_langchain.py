"""LangChain's ChatOpenAI: answers, streams, several at once, and what Morph says beside the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.conftest import NAME, Served

langchain = pytest.importorskip("langchain_openai", reason="needs langchain-openai (extra clients)")


def model(served: Served, **more: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 16, "max_retries": 0, "extra_body": {"morph": {"layout": "0110"}}}
    return langchain.ChatOpenAI(base_url=served.url + "/v1", api_key="none", model=NAME, **{**options, **more})


def test_streamed_and_whole_answers_agree(served: Served) -> None:
    chat = model(served)
    whole = chat.invoke("Hi")
    parts = list(chat.stream("Hi"))
    assert whole.content and "".join(part.content for part in parts) == whole.content
    assert whole.usage_metadata["output_tokens"] == 16
    assert whole.response_metadata["finish_reason"] == "length"


def test_a_conversation_with_roles(served: Served) -> None:
    chat = model(served)
    first = chat.invoke([("system", "Be brief."), ("human", "Hi")])
    second = chat.invoke([("system", "Be brief."), ("human", "Hi"), ("ai", first.content), ("human", "And?")])
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def test_many_at_once_are_each_answered_as_alone(served: Served) -> None:
    chat = model(served)
    prompts = [f"Number {number}" for number in range(6)]
    together = [answer.content for answer in asyncio.run(chat.abatch(prompts))]
    assert together == [chat.invoke(prompt).content for prompt in prompts]


def test_a_mistake_is_the_client_s_own_error(served: Served) -> None:
    with pytest.raises(Exception, match=r"morph\.layout|layout"):
        model(served, extra_body={"morph": {"layout": "01"}}).invoke("Hi")
