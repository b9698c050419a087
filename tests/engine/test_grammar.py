"""Constrained answers: whatever the model wants, what comes out matches."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from morph import LLM, SamplingParams
from morph.checkpoint.tokenizer import ChatTokenizer
from morph.engine.grammar import Grammar, Grammars
from morph.errors import InvalidRequest
from tests.tiny import tiny_model

EOS = 256


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    """One token per byte and some of several bytes, so that tokens run across the grammar's pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [('"', ":"), ("t", "r"), ("tr", "ue"[0]), ("}", "}"), ('"', ","), ("1", "2")]
    vocab = {token: number for number, token in enumerate(alphabet)} | {"<eos>": EOS}
    for pair in merges:
        vocab.setdefault("".join(pair), len(vocab))
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<eos>"])
    return ChatTokenizer(inner, eos_token_ids=[EOS])


@pytest.fixture(scope="module")
def grammars(tokenizer: ChatTokenizer) -> Grammars:
    # The head has more tokens than the tokenizer knows, as padded vocabularies do.
    return Grammars(tokenizer, 270, (EOS,))


def answer(grammars: Grammars, tokenizer: ChatTokenizer, grammar: Grammar, rng: random.Random, most: int = 3000) -> str:
    """Tokens drawn at random among those that may come, to the end."""
    constraint = grammars.start(grammar)
    tokens: list[int] = []
    while not constraint.finished:
        logits = torch.tensor([rng.gauss(0, 1) for _ in range(270)])
        constraint.mask_(logits)
        token = int(logits.argmax())
        assert torch.isfinite(logits[token]), "nothing may come, but the answer is not complete"
        if token == EOS:
            break
        tokens.append(token)
        constraint.accept(token)
        assert constraint.error is None and len(tokens) < most
    return tokenizer.decode(tokens)


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random JSON schema whose instances are short."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * (3 if depth < 3 else 0))
    if kind == "object":
        names = rng.sample(["a", "name", "größe", "x y", "id", "tags", "0"], rng.randint(1, 4))
        required = [name for name in names if rng.random() < 0.6]
        properties = {name: schema(rng, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        least = rng.randint(0, 2)
        return {
            "type": "array",
            "items": schema(rng, depth + 1),
            "minItems": least,
            "maxItems": least + rng.randint(0, 2),
        }
    if kind == "anyOf":
        return {"anyOf": [schema(rng, depth + 1), schema(rng, depth + 1)]}
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 12)}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 5000)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": 1}
    if kind == "enum":
        return {"enum": rng.sample(["red", "grün", 3, 1.5, True, None, 'a"b', ""], 3)}
    if kind == "const":
        return {"const": rng.choice(["yes", 7, {"k": [1, 2]}, [None]])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^[0-9]{4}-[0-9]{2}$", "^(ja|nein)$"])}
    return {"type": kind}


@pytest.mark.parametrize("part", range(10))
def test_two_hundred_random_schemas_are_always_obeyed(grammars: Grammars, tokenizer: ChatTokenizer, part: int) -> None:
    for seed in range(part * 20, part * 20 + 20):
        rng = random.Random(seed)
        wanted = schema(rng)
        text = answer(grammars, tokenizer, Grammar.json_schema(wanted), rng)
        jsonschema.validate(json.loads(text), wanted)


@pytest.mark.parametrize("pattern", [r"[a-f]{3}-[0-9]{2,4}", r"(yes|no)( please)?", r"ä+ö"])
def test_regular_expressions_are_obeyed(grammars: Grammars, tokenizer: ChatTokenizer, pattern: str) -> None:
    for seed in range(5):
        text = answer(grammars, tokenizer, Grammar("regex", pattern), random.Random(seed))
        assert re.fullmatch(pattern, text), text


def test_a_grammar_is_obeyed(grammars: Grammars, tokenizer: ChatTokenizer) -> None:
    lark = 'start: "SELECT " name ("," name)* " FROM " name\nname: /[a-z]{1,4}/'
    for seed in range(5):
        text = answer(grammars, tokenizer, Grammar("lark", lark), random.Random(seed))
        assert re.fullmatch(r"SELECT [a-z]{1,4}(,[a-z]{1,4})* FROM [a-z]{1,4}", text), text


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema({"type": "nonsense"}),
        Grammar("json", "{"),
        Grammar("regex", "(", "morph.regex"),
        Grammar("lark", "start: nothing", "morph.grammar"),
        Grammar("regex", "a" * 1_000_001),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(grammars: Grammars, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammars.start(grammar)
    assert refused.value.param == grammar.param and grammar.param in str(refused.value)


def test_a_tokenizer_that_cannot_be_read_is_said_so() -> None:
    with pytest.raises(InvalidRequest, match="cannot be constrained"):
        Grammars(object(), 10, (1,)).start(Grammar("regex", "a"))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tiny_model(tmp_path_factory.mktemp("model") / "m")
    # With names for the ids beyond bytes: the end token is among them.
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())["model"]
    tokenizer.add_special_tokens([f"<{number}>" for number in range(256, config["vocab_size"])])
    tokenizer.save(str(folder / "tokenizer.json"))
    return LLM(folder, dtype="float32")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layout", ["attention", "ssm"])
def test_constrained_and_free_requests_share_a_batch(llm: LLM, temperature: float, layout: str) -> None:
    wanted = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"type": "string", "maxLength": 5}},
        "required": ["n", "s"],
        "additionalProperties": False,
    }
    free = SamplingParams(max_tokens=20, temperature=temperature, seed=3, layout=layout, ignore_eos=True)
    bound = SamplingParams(
        max_tokens=400, temperature=temperature, seed=3, layout=layout, grammar=Grammar.json_schema(wanted)
    )
    alone = llm.generate(["Hello"], free)[0]
    outputs = llm.generate(["Hello", "Give me an object", "Again"], [free, bound, bound])
    assert outputs[0].token_ids == alone.token_ids
    for output in outputs[1:]:
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), wanted)


def test_length_cuts_a_constrained_answer(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, layout="attention", grammar=Grammar("regex", "[a-z]{10}"))
    output = llm.generate(["x"], params)[0]
    assert output.finish_reason == "length" and re.fullmatch("[a-z]{4}", output.text)
