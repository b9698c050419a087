"""The tokenizer inside a GGUF file, written as `tokenizer.json`.

llama.cpp names the pre-tokenizer in `tokenizer.ggml.pre`; each name stands for one splitting rule
(`llama-vocab.cpp`). An unknown name is refused: a wrong rule gives other tokens, and nothing would show it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from morph.checkpoint.gguf_file import GGUFFile
from morph.errors import CorruptFile, MorphError, UnsupportedModel

CONVERTER_VERSION = 1
"""Raised when the same file converts to another tokenizer, so that cached ones are made again."""

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Token types of llama.cpp."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "smaug-bpe": LLAMA3, "falcon3": LLAMA3,
    "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
}  # fmt: skip
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b")
"""Every digit by itself, then GPT-2's rule."""
GPT2 = ("gpt-2", "gpt2")
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""These look a word up before merging, and begin with BOS unless the file says otherwise."""


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, the chat template in the latter.

    Raises:
        CorruptFile: the vocabulary is missing or incomplete.
        UnsupportedModel: a tokenizer that Morph cannot rebuild exactly.
    """
    try:
        fields = _Fields(file)
        tokenizer = _build(fields)
    except MorphError:
        raise
    except Exception as error:
        # The tokenizers library raises plain Exception, and a damaged field can be of any type.
        raise CorruptFile(f"{file.path}: the tokenizer makes no sense ({error}); {file.remedy}") from error
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.config.max_context,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = fields.token(f"{key}_token_id")
        if token is not None:
            config[f"{name}_token"] = token
    template = file.header.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", "utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


def _build(fields: _Fields) -> Tokenizer:
    kind, path = fields.get("model"), fields.file.path
    if kind == "gpt2":
        tokenizer, bos_default = _byte_level(fields), fields.get("pre") in WHOLE_WORDS_FIRST
    elif kind == "llama":
        tokenizer, bos_default = _sentencepiece(fields), True
    else:
        raise UnsupportedModel(
            f"{path}: tokenizer {kind!r} is not supported (want gpt2 or llama); use the safetensors folder"
        )
    _add_special(tokenizer, fields)
    _add_ends(tokenizer, fields, bos_default)
    return tokenizer


def cached_tokenizer(file: GGUFFile) -> Path:
    """Folder with the tokenizer of a bare GGUF file, made when the file is first opened."""
    from morph.hub.paths import cache_home

    folder = cache_home() / "tokenizers" / f"{file.header.fields_digest()[:24]}-{CONVERTER_VERSION}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
        try:
            write_tokenizer(file, building)
            try:
                os.rename(building, folder)
            except OSError:
                # Another process was first; its folder holds the same.
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder


class _Fields:
    """The `tokenizer.ggml.*` fields of a file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise CorruptFile(f"{file.path} has no tokenizer.ggml.tokens; {file.remedy}")
        self.tokens: list[str] = tokens
        self.types: list[int] = self.get("token_type") or [1] * len(tokens)
        if len(self.types) != len(tokens):
            raise CorruptFile(f"{file.path} has {len(tokens)} tokens and {len(self.types)} token types; {file.remedy}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.header.get(f"tokenizer.ggml.{key}", default)

    def token(self, key: str) -> str | None:
        """Text of a token that a field names by its id."""
        number = self.get(key)
        return self.tokens[number] if number is not None and 0 <= number < len(self.tokens) else None


def _byte_level(fields: _Fields) -> Tokenizer:
    pre = fields.get("pre", "default")
    merges = fields.get("merges")
    if merges is None:
        raise CorruptFile(f"{fields.file.path} has no tokenizer.ggml.merges; {fields.file.remedy}")
    model = models.BPE(
        vocab={token: number for number, token in enumerate(fields.tokens)},
        merges=[tuple(merge.split(" ", 1)) for merge in merges],
        ignore_merges=pre in WHOLE_WORDS_FIRST,
    )
    tokenizer = Tokenizer(model)
    if pre in SPLITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre in SINGLE_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        known = ", ".join([*SPLITS, *SINGLE_DIGITS, *GPT2])
        raise UnsupportedModel(
            f"{fields.file.path}: pre-tokenizer {pre!r} is not supported (known: {known}); "
            "use the safetensors folder, which has its own tokenizer.json"
        )
    if SPLITS.get(pre) is QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: _Fields) -> Tokenizer:
    scores = fields.get("scores")
    if not isinstance(scores, list) or len(scores) != len(fields.tokens):
        raise CorruptFile(f"{fields.file.path} has no score per token (tokenizer.ggml.scores); {fields.file.remedy}")
    vocab = {token: number for number, token in enumerate(fields.tokens)}
    model = models.BPE(
        vocab=vocab,
        merges=merges_of(vocab, scores, fields.types),
        unk_token=fields.token("unknown_token_id"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(fields.get("add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    return tokenizer


def merges_of(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """BPE merges that a SentencePiece vocabulary implies: every way to make a piece of two, best score first.

    Args:
        vocab: piece -> id. scores, types: by id; control and unknown tokens are never made by merging.
    """
    merges = []
    for piece, number in vocab.items():
        if types[number] in (UNKNOWN, CONTROL):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[number], vocab[left], vocab[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _add_special(tokenizer: Tokenizer, fields: _Fields) -> None:
    """Tokens that are matched whole in text: control tokens (special) and user-defined ones."""
    for token, kind in zip(fields.tokens, fields.types, strict=True):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    unknown = fields.token("unknown_token_id")
    if unknown is not None and fields.get("model") == "llama":
        tokenizer.add_special_tokens([AddedToken(unknown, normalized=False, special=True)])


def _add_ends(tokenizer: Tokenizer, fields: _Fields, bos_default: bool) -> None:
    """BOS and EOS around a text, as the file asks for."""
    bos, eos = fields.token("bos_token_id"), fields.token("eos_token_id")
    begin = bos if bos is not None and fields.get("add_bos_token", bos_default) else None
    end = eos if eos is not None and fields.get("add_eos_token", False) else None
    if begin is None and end is None:
        return
    parts = [*([begin] if begin else []), "$A", *([end] if end else [])]
    special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((begin, end)) if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)
