"""The shape of answers: OpenAI's objects, usage, log probabilities and the `morph` object."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.fake import ANSWER, FakeEngine

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Hi"}]
GATE = {
    "layout": "1001",
    "layout_source": "gate",
    "attention_blocks": 2,
    "attention_budget": 0.5,
    "predicted_loss": 0.25,
}
FIXED = {
    "layout": "0110",
    "layout_source": "request",
    "attention_blocks": 2,
    "attention_budget": None,
    "predicted_loss": None,
}


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    response = await client.post(path, json={"model": "fake-1", **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_chat_completion_has_openai_s_fields(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.cached_tokens = 5
    answer = await post(client, "/v1/chat/completions", messages=MESSAGES)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake-1"
    assert answer["created"] > 1_600_000_000
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = len("[user]Hi\n[assistant]")
    made = len(ANSWER.encode()) + 1
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    assert answer["morph"] == GATE


async def test_a_text_completion_has_openai_s_fields(client: httpx.AsyncClient) -> None:
    answer = await post(client, "/v1/completions", prompt="Hi", max_tokens=5, morph={"layout": "0110"})
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}]
    assert answer["morph"] == FIXED


async def test_the_chat_template_is_applied_without_further_special_tokens(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "Ann",
        },
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "d"},
    ]
    await post(client, "/v1/chat/completions", messages=messages)
    assert bytes(engine.seen[0][0]).decode() == "[system]Be kind.\n[user]ab\n[assistant]c\n[user]d\n[assistant]"


async def test_each_form_of_prompt_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for prompt in ("ab", ["ab", "c"], [97, 98], [[97, 98], [99]]):
        await post(client, "/v1/completions", prompt=prompt, max_tokens=1)
    assert [ids for ids, _ in engine.seen] == [
        [256, 97, 98],
        [256, 97, 98],
        [256, 99],
        [97, 98],
        [97, 98],
        [99],
    ]


async def test_choices_are_ordered_by_prompt_then_by_n(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await post(client, "/v1/completions", prompt=["ab", "c"], n=2, max_tokens=3, echo=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["abHel", "abHel", "cHel", "cHel"]
    assert answer["usage"]["prompt_tokens"] == 3 + 2
    assert answer["usage"]["completion_tokens"] == 12
    assert all(choice["morph"] == GATE for choice in answer["choices"])
    assert len(engine.seen) == 4


async def test_stop_strings_end_the_answer(client: httpx.AsyncClient) -> None:
    answer = await post(client, "/v1/chat/completions", messages=MESSAGES, stop=["!", "wör"])
    assert answer["choices"][0]["message"]["content"] == "Hello, "
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_chat_logprobs(client: httpx.AsyncClient) -> None:
    answer = await post(client, "/v1/chat/completions", messages=MESSAGES, max_tokens=9, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 9
    assert content[0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "I", "logprob": -1.5, "bytes": [73]},
        ],
    }
    # The first byte of ö is no text of its own.
    assert content[8]["bytes"] is None


async def test_chat_logprobs_without_alternatives(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await post(client, "/v1/chat/completions", messages=MESSAGES, max_tokens=2, logprobs=True)
    assert engine.seen[0][1].logprobs == 0
    assert [item["top_logprobs"] for item in answer["choices"][0]["logprobs"]["content"]] == [[], []]


async def test_completion_logprobs(client: httpx.AsyncClient) -> None:
    answer = await post(client, "/v1/completions", prompt="Hi", max_tokens=2, logprobs=1)
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["H", "e"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"H": -0.5}, {"e": -0.5}],
        "text_offset": [0, 1],
    }


async def test_echo_scores_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await post(
        client,
        "/v1/completions",
        prompt=[65, 66],
        max_tokens=1,
        echo=True,
        logprobs=1,
        morph={"gate_tokens": 1},
    )
    assert engine.seen[0][1].prompt_logprobs == 1
    choice = answer["choices"][0]
    assert choice["text"] == "ABH"
    assert choice["logprobs"] == {
        "tokens": ["A", "B", "H"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"B": -0.5}, {"H": -0.5}],
        "text_offset": [0, 1, 2],
    }


async def test_echo_with_no_tokens_only_scores(client: httpx.AsyncClient) -> None:
    answer = await post(
        client, "/v1/completions", prompt="AB", max_tokens=0, echo=True, logprobs=0, morph={"layout": "ssm"}
    )
    choice = answer["choices"][0]
    assert choice["text"] == "AB"
    assert choice["logprobs"]["tokens"] == ["<s>", "A", "B"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


async def test_a_model_without_gates_scores_without_gate_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    object.__setattr__(engine.config, "block_kinds", ("attention",) * 4)
    answer = await post(client, "/v1/completions", prompt="AB", max_tokens=1, echo=True, logprobs=0)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 4


async def test_models_lists_the_one_model(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model["id"] == "fake-1"
    assert model["object"] == "model"
    assert model["max_model_len"] == 512
    assert model["morph"]["blocks"] == 4
    assert (await client.get("/v1/models/fake-1")).json() == model


async def test_tokenize_and_detokenize_are_inverse(client: httpx.AsyncClient) -> None:
    answer = await post(client, "/tokenize", prompt="Hé")
    assert answer == {"tokens": [256, 72, 195, 169], "count": 4, "max_model_len": 512}
    assert await post(client, "/detokenize", tokens=answer["tokens"]) == {"prompt": "<s>Hé"}
    bare = await post(client, "/tokenize", prompt="Hé", add_special_tokens=False)
    assert bare["tokens"] == [72, 195, 169]
    assert (await post(client, "/tokenize", messages=MESSAGES))["count"] == len("[user]Hi\n[assistant]")


async def test_health_follows_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.get("/health")).status_code == 200
    engine.alive, engine.error = False, "boom"
    response = await client.get("/health")
    assert response.status_code == 503
    assert "boom" in response.json()["error"]["message"]


async def test_metrics_have_the_names_of_the_field(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.preemptions, engine.cached_tokens = 3, 4
    await post(client, "/v1/chat/completions", messages=MESSAGES, max_tokens=5)
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    for line in (
        "morph_time_to_first_token_seconds_count 1.0",
        "morph_time_per_output_token_seconds_count 1.0",
        "morph_e2e_request_latency_seconds_count 1.0",
        'morph_requests_total{finish_reason="length"} 1.0',
        "morph_generation_tokens_total 5.0",
        "morph_cached_prompt_tokens_total 4.0",
        "morph_num_requests_running 0.0",
        "morph_num_requests_waiting 0.0",
        "morph_num_preemptions_total 3.0",
        'morph_unit_pages{kind="attention"} 30.0',
        'morph_unit_pages{kind="ssm"} 10.0',
        'morph_unit_pages{kind="free"} 60.0',
        "morph_attention_share 0.75",
        'morph_request_attention_share_count{layout_source="gate"} 1.0',
        "morph_engine_up 1.0",
    ):
        assert line in lines, line
