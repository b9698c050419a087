"""The openai npm client: answers are the engine's, errors its own; a stream that it leaves frees its slot."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.clients.conftest import NAME, Served
from tests.clients.test_documented_examples import JS
from tests.server.test_clients import wait_for

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node"),
    pytest.mark.skipif(not (JS / "node_modules").exists(), reason="needs `npm install --prefix tests/clients/js`"),
]


def node(served: Served, body: str) -> Any:
    """What a script with `client` and `model` gives to `tell`."""
    head = (
        'import OpenAI from "openai";\n'
        f'const client = new OpenAI({{ baseURL: "{served.url}/v1", apiKey: "none", maxRetries: 0 }});\n'
        f'const model = "{NAME}";\n'
        'const messages = [{ role: "user", content: "Hi" }];\n'
        "const tell = (value) => console.log(JSON.stringify(value));\n"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", head + body], capture_output=True, text=True, cwd=JS, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_streamed_and_whole_answers_agree(served: Served) -> None:
    told = node(
        served,
        """
        const same = { model, messages, temperature: 0, max_tokens: 24, morph: { layout: "1010" } };
        const whole = await client.chat.completions.create({ ...same, logprobs: true, top_logprobs: 2 });
        const stream = await client.chat.completions.create(
          { ...same, stream: true, stream_options: { include_usage: true } });
        let text = "", usage = null, layouts = new Set();
        for await (const chunk of stream) {
          text += chunk.choices[0]?.delta?.content ?? "";
          usage = chunk.usage ?? usage;
          if (chunk.morph) layouts.add(chunk.morph.layout);
        }
        tell({ whole, text, usage, layouts: [...layouts] });
        """,
    )
    choice = told["whole"]["choices"][0]
    assert choice["message"]["content"] == told["text"] != ""
    assert told["whole"]["usage"] == told["usage"]
    assert told["layouts"] == ["1010"] == [told["whole"]["morph"]["layout"]]
    assert len(choice["logprobs"]["content"]) == told["usage"]["completion_tokens"]


def test_completions_models_and_errors(served: Served) -> None:
    told = node(
        served,
        """
        const many = await client.completions.create({ model, prompt: ["a", "b"], n: 2, max_tokens: 3 });
        const models = [];
        for await (const one of client.models.list()) models.push(one.id);
        const errors = [];
        for (const wrong of [{ morph: { layuot: "auto" } }, { model: "other" }]) {
          try { await client.completions.create({ model, prompt: "a", ...wrong }); }
          catch (error) { errors.push([error.constructor.name, error.status, error.param, error.code]); }
        }
        tell({ choices: many.choices.map((one) => one.index), models, errors });
        """,
    )
    assert told["choices"] == [0, 1, 2, 3]
    assert told["models"] == [NAME]
    assert told["errors"] == [
        ["BadRequestError", 400, "morph.layuot", "unknown_parameter"],
        ["NotFoundError", 404, "model", "model_not_found"],
    ]


def test_a_stream_that_is_left_frees_its_slot(served: Served) -> None:
    told = node(
        served,
        """
        const stream = await client.completions.create({
          model, prompt: "a", max_tokens: 500, stream: true, ignore_eos: true, morph: { layout: "attention" } });
        let seen = 0;
        for await (const chunk of stream) if (++seen === 3) break;
        tell({ seen });
        """,
    )
    assert told["seen"] == 3
    wait_for(lambda: served.engine.stats()["running"] == 0)
    stats = served.engine.stats()
    assert stats["aborted"] == 1 and stats["units_free"] == stats["units_total"]
