"""The light tokenizer against transformers' own, and the conversion from GGUF."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from morph.checkpoint import load_tokenizer, open_model
from morph.checkpoint.gguf_file import GGUFFile
from morph.checkpoint.gguf_tokenizer import LLAMA3, QWEN2, TEKKEN, write_tokenizer
from morph.errors import CorruptFile, InvalidRequest, UnsupportedModel
from tests.checkpoint.files import byte_tokenizer, write_gguf
from tests.tiny import tiny_config, tiny_tensors

TEXT = (
    "The cat sat on the mat, and the other cats sat there too. It's 1234 or 99  days since 2021-03-04; they'll see.\n"
    "def f(x):\n    return x ** 2  # ünïcödé, 漢字, 🙂 and tabs\t\t!\n\n\n"
    "We've SEEN ThisCase; the HTTP_Server's log:  12   34\n"
)
SAMPLES = [
    "", " ", "\n", "  12 cats", "it's 3.14 or 1,000,000", "a\t\tb\r\n\r\nc", "漢字 🙂🙂 é e\u0301", "HTTPServer'S x'll",
    "<|im_start|>the<|im_end|>", "the<|im_end|> the", "    return  x\n\n\n  y", "\u00a0x\u2028y", "ends with spaces   ",
]  # fmt: skip

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "tools": """{{- bos_token }}
{%- if tools is not none %}
    {{- "Tools:" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }} {{ tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{% for message in messages %}
    {% if message.role == "user" %}
        {%- set ns.last = loop.index0 %}
    {% endif %}
{% endfor %}
{%- for message in messages %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- if message.name is defined %}[{{ message.name }}]{% endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content.split('</think>')[-1].lstrip('\\n') }}{{ eos_token }}{% endgeneration %}
    {%- else %}<{{ message.role | upper }} {{ loop.index0 }}/{{ ns.last }}>{{ message.content | trim }}
    {%- endif %}
{%- endfor %}
{{ unknown_thing }}{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- if add_generation_prompt %}<ASSISTANT>{% endif %}""",
    "date": "{{ strftime_now('%Y') }} {{ messages[0]['content'] }} <b>{{ messages | tojson }}</b>",
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What's  5 < 6 & \"7\"?\n"}],
    [{"role": "system", "content": "S"}, {"role": "user", "content": "é 漢"},
     {"role": "assistant", "content": "</think>b"},
     {"role": "tool", "content": "42"}, {"role": "user", "content": " trailing ", "name": None}],
    [{"role": "user", "content": str(i), "name": "n"} for i in range(9)],
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f<é>", "parameters": {"type": "object", "properties": {}}}}


def trained(pre: Any, normalizer: Any = None, ignore_merges: bool = False) -> Tokenizer:
    """A small byte-level BPE."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
KINDS: dict[str, Tokenizer] = {
    "smollm": trained(DIGITS),
    "gpt-2": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-bpe": trained(split(LLAMA3), ignore_merges=True),
    "qwen2": trained(split(QWEN2), normalizers.NFC()),
    "tekken": trained(split(TEKKEN), ignore_merges=True),
}


def gguf_fields(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """What llama.cpp's converter writes for a byte-level BPE."""
    model = json.loads(tokenizer.to_str())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": vocab,
        "ggml.token_type": [3] * 3 + [1] * (len(vocab) - 3),
        "ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.add_bos_token": False,
        "chat_template": TEMPLATES["chatml"],
    }


def converted(folder: Path, fields: dict[str, Any]) -> Any:
    config = tiny_config(ssm=False, vocab_size=len(fields["ggml.tokens"]), num_blocks=1)
    path = write_gguf(folder / "m.gguf", config, tiny_tensors(config)[0], tokenizer=fields)
    write_tokenizer(GGUFFile(path), folder / "out")
    return load_tokenizer(folder / "out")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    """Each reference tokenizer, and what its GGUF form converts to."""
    return {
        pre: (reference, converted(tmp_path_factory.mktemp("gguf"), gguf_fields(reference, pre)))
        for pre, reference in KINDS.items()
    }


# ---- conversion from GGUF


@pytest.mark.parametrize("pre", KINDS)
def test_converted_tokenizers_give_the_original_ids(pre: str, pairs: dict[str, tuple[Tokenizer, Any]]) -> None:
    reference, own = pairs[pre]
    for text in [*SAMPLES, TEXT]:
        assert own.encode(text) == reference.encode(text).ids, text
        assert own.decode(own.encode(text)) == reference.decode(reference.encode(text).ids)
    assert own.vocab_size == reference.get_vocab_size() and own.eos_token_ids == (2,)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_converted_tokenizers_agree_on_any_text(text: str, pairs: dict[str, tuple[Tokenizer, Any]]) -> None:
    for pre, (reference, own) in pairs.items():
        ids = own.encode(text)
        assert ids == reference.encode(text).ids, pre
        if pre != "qwen2" and "<|" not in text:
            # NFC changes text; without special tokens all else is lossless.
            assert own.decode(ids) == text
            assert b"".join(own.token_bytes(number) for number in ids) == text.encode()


def test_digits_after_spaces_are_split_as_the_base_was_trained(
    pairs: dict[str, tuple[Tokenizer, Any]],
) -> None:
    own = pairs["smollm"][1]
    assert own.convert_ids_to_tokens(own.encode("  12"))[-2:] == ["1", "2"]


@pytest.mark.parametrize(
    ("add_bos", "pre", "expected"),
    [(True, "smollm", True), (None, "llama-bpe", True), (None, "smollm", False)],
)
def test_bos_is_added_where_the_file_or_its_kind_says_so(
    add_bos: bool | None, pre: str, expected: bool, tmp_path: Path
) -> None:
    own = converted(tmp_path, gguf_fields(KINDS[pre], pre) | {"ggml.add_bos_token": add_bos})
    assert (own.encode("the")[0] == 1) is expected
    assert 1 not in own.encode("the", add_special_tokens=False)


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'klingon' is not supported \(known: llama-bpe"):
        converted(tmp_path, gguf_fields(KINDS["smollm"], "klingon"))
    with pytest.raises(UnsupportedModel, match="tokenizer 'bert'"):
        converted(tmp_path, gguf_fields(KINDS["smollm"], "smollm") | {"ggml.model": "bert"})
    with pytest.raises(CorruptFile, match=r"ggml\.merges"):
        converted(tmp_path, gguf_fields(KINDS["smollm"], "smollm") | {"ggml.merges": None})
    with pytest.raises(CorruptFile, match="token types"):
        converted(tmp_path, gguf_fields(KINDS["smollm"], "smollm") | {"ggml.token_type": [1, 1]})


PIECES = ["he", "ll", "▁t", "▁the", "the", "llo", "hello", "▁hello", "or", "wor", "▁w", "ld", "▁world", "▁▁"]
LETTERS = ["▁", *"abcdehlorstw.,!"]


def sentencepiece_fields() -> dict[str, Any]:
    """A Llama 2 vocabulary: control tokens, bytes, pieces with scores that are not in the order of ids, letters."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *LETTERS]
    scores = [0.0] * 259 + [-float((i * 5) % len(PIECES)) for i in range(len(PIECES))] + [-1000.0] * len(LETTERS)
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": tokens,
        "ggml.scores": scores,
        "ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }


def sentencepiece(text: str, fields: dict[str, Any]) -> list[str]:
    """The algorithm as sentencepiece has it: join the neighbours that make the best piece, leftmost first."""
    score = dict(zip(fields["ggml.tokens"], fields["ggml.scores"], strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]
        if not pairs:
            return [q for p in parts for q in ([p] if p in score else [f"<0x{x:02X}>" for x in p.encode()])]
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=100, deadline=None)
@given(
    text=st.lists(st.sampled_from(["the", "hello", " ", "world", "he", "llo", "é", "x", "wor", "t"]), min_size=1).map(
        "".join
    )
)
def test_sentencepiece_vocabularies_merge_by_score(text: str, spm: Any) -> None:
    ids = spm.encode(text)
    assert spm.convert_ids_to_tokens(ids) == ["<s>", *sentencepiece(text, sentencepiece_fields())]
    assert spm.decode(ids) == text
    assert b"".join(spm.token_bytes(number) for number in ids[1:]) == b" " + text.encode()


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return converted(tmp_path_factory.mktemp("spm"), sentencepiece_fields())


def test_sentencepiece_control_tokens_are_matched_in_text(spm: Any) -> None:
    assert spm.convert_ids_to_tokens(spm.encode("the</s>the"))[1:] == ["▁the", "</s>", "▁the"]
    assert spm.token_bytes(2) == b"</s>" and spm.eos_token_ids == (2,)


def test_a_bare_gguf_file_gets_its_tokenizer_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(ssm=False)
    monkeypatch.setenv("MORPH_HOME", str(tmp_path / "home"))
    path = write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config)[0])
    folder = open_model(path).tokenizer_dir
    assert load_tokenizer(folder).encode("the") == load_tokenizer(folder).inner.encode("the").ids
    assert list((tmp_path / "home" / "tokenizers").iterdir()) == [folder]
    stamp = (folder / "tokenizer.json").stat().st_mtime_ns
    assert open_model(path).tokenizer_dir == folder and (folder / "tokenizer.json").stat().st_mtime_ns == stamp
    other = byte_tokenizer(config.vocab_size) | {"chat_template": "x"}
    second = open_model(write_gguf(tmp_path / "o.gguf", config, tiny_tensors(config)[0], tokenizer=other))
    assert second.tokenizer_dir != folder


# ---- against transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    return converted(folder, gguf_fields(KINDS["smollm"], "smollm")) and folder / "out"


def with_template(folder: Path, template: Any) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_render_as_transformers_renders_them(name: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    with_template(folder, TEMPLATES[name])
    own, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for chat in CHATS:
        for options in ({}, {"tools": [TOOL]}, {"enable_thinking": False}):
            for generation in (False, True):
                keywords = {"add_generation_prompt": generation, **options}
                expected = reference.apply_chat_template(chat, tokenize=False, **keywords)
                text = own.apply_chat_template(chat, **keywords)
                assert text == expected
                ids = own.apply_chat_template(chat, tokenize=True, **keywords)
                assert ids == reference(expected, add_special_tokens=False)["input_ids"]


def test_text_goes_in_and_out_as_with_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    own, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in [*SAMPLES, TEXT]:
        for special in (True, False):
            ids = own.encode(text, add_special_tokens=special)
            assert ids == reference.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert own.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    assert own.vocab_size == len(reference)
    assert own.convert_ids_to_tokens([1, 50]) == reference.convert_ids_to_tokens([1, 50])
    assert own.special["eos_token"] == reference.eos_token


def test_templates_come_from_files_and_by_name(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with_template(tmp_path, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    own = load_tokenizer(tmp_path)
    assert own.chat_template == "plain"
    assert (own.apply_chat_template(CHATS[0]), own.apply_chat_template(CHATS[0], tools=[TOOL])) == (
        "plain",
        "tools",
    )
    (tmp_path / "chat_template.jinja").write_text("file{{ eos_token }}")
    assert load_tokenizer(tmp_path).apply_chat_template(CHATS[0]) == "file<|im_end|>"


def test_special_tokens_may_be_written_with_attributes(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = {"eos_token": {"content": "<|endoftext|>", "lstrip": False}, "chat_template": "{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    own = load_tokenizer(tmp_path)
    assert own.apply_chat_template([]) == "<|endoftext|>" and own.eos_token_ids == (0, 2)


# ---- errors


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{% if %}", "cannot be compiled"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "refuses the messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set x = messages.append(1) %}", "unsafe"),
    ],
)
def test_a_template_that_fails_is_the_requests_fault(template: str | None, message: str, folder: Path) -> None:
    with_template(folder, template)
    with pytest.raises(InvalidRequest, match=message):
        load_tokenizer(folder).apply_chat_template(CHATS[0])


def test_missing_and_broken_tokenizers_are_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=r"no tokenizer\.json.*morph pull --force"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CorruptFile, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_an_id_beyond_the_vocabulary_has_no_bytes(folder: Path) -> None:
    own = load_tokenizer(folder)
    with pytest.raises(InvalidRequest, match="token id 9999"):
        own.token_bytes(9999)
    assert own.convert_ids_to_tokens([9999]) == [None]


def test_truncation_and_padding_stored_in_the_file_do_not_apply(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(KINDS["gpt-2"].to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("xyzxyzxyz")) == 9


def test_threads_may_share_one_tokenizer(folder: Path) -> None:
    with_template(folder, TEMPLATES["tools"])
    own = load_tokenizer(folder)
    expected = own.apply_chat_template(CHATS[1], tokenize=True)
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(50):
            found = own.apply_chat_template(CHATS[1], tokenize=True)
            if found != expected or own.encode(own.decode(found, skip_special_tokens=False)) != expected:
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
