"""What a serving benchmark asks of every target: how many tokens in and out, at which concurrency."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

DOCUMENT_SEPARATOR = "<|doc|>"
TEXT_SUFFIXES = (".txt", ".md", ".txt.gz", ".md.gz")


@dataclass(frozen=True)
class Workload:
    """One row of a benchmark.

    Attributes:
        input_tokens, output_tokens: tokens of each request.
        concurrency: requests in flight; the next one is sent when one ends (closed loop).
        requests: timed requests.
        warmup: requests before the timed ones, on text of their own, sent the same way.
    """

    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    warmup: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        """A row written as `IN/OUT@CONCURRENCYxREQUESTS`, as in `512/64@8x16`. Warm-up is about as much as
        one prompt of 512 tokens per slot: a full house of short prompts, one long prompt.

        Raises:
            ValueError: written otherwise.
        """
        match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)@([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            raise ValueError(f"row {text!r}: write IN/OUT@CONCURRENCYxREQUESTS, as in 512/64@8x16")
        tokens_in, tokens_out, concurrency, requests = map(int, match.groups())
        warmup = min(concurrency, max(1, concurrency * 512 // tokens_in))
        return cls(tokens_in, tokens_out, concurrency, requests, warmup)

    @property
    def name(self) -> str:
        """Tokens in and out, as in `512x64`."""
        return f"{self.input_tokens}x{self.output_tokens}"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that cutting prompts needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of the text."""
        ...


def read_documents(path: Path) -> list[str]:
    """The documents of a text file, or of all text files below a folder in the order of their names.

    Raises:
        ValueError: the path holds no text.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    documents: list[str] = []
    for file in files:
        if not file.name.endswith(TEXT_SUFFIXES) or file.name.startswith("README"):
            continue
        raw = file.read_bytes()
        text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8")
        documents += [part for part in map(str.strip, text.split(DOCUMENT_SEPARATOR)) if part]
    if not documents:
        raise ValueError(f"no text in {path}: give a file or folder with {', '.join(TEXT_SUFFIXES)}")
    return documents


def load_tokenizer(model: str) -> Tokenizer:
    """Tokenizer of a model: a name that Morph knows, a model folder or a .gguf file."""
    # Imported here: both take seconds, and nothing else of the client needs them.
    from transformers import PreTrainedTokenizerFast

    from morph.checkpoint import open_model
    from morph.hub import resolve_model

    folder = open_model(resolve_model(model)).tokenizer_dir
    return cast(Tokenizer, PreTrainedTokenizerFast.from_pretrained(folder))


class PromptSource:
    """Cuts prompts out of a text: consecutive windows of its tokens, none of them used twice."""

    def __init__(self, documents: Iterable[str], tokenizer: Tokenizer) -> None:
        self._tokens: list[int] = []
        for document in documents:
            self._tokens += tokenizer.encode(document, add_special_tokens=False)
        self._next = 0
        self._openings: set[int] = set()

    def take(self, length: int) -> list[int]:
        """The next prompt of `length` tokens. No two prompts begin with the same token, so that no
        prefix cache can help (nor hurt) a target.

        Raises:
            ValueError: the text is used up.
        """
        while self._next + length <= len(self._tokens):
            start = self._next
            if self._tokens[start] not in self._openings:
                self._openings.add(self._tokens[start])
                self._next = start + length
                return self._tokens[start : start + length]
            self._next += 1
        raise ValueError(f"text of {len(self._tokens)} tokens is too short for the workload: give more with --text")


@dataclass(frozen=True)
class Prompts:
    """Token ids of one row's prompts; all targets get the same ones."""

    warmup: Sequence[list[int]]
    timed: Sequence[list[int]]


def cut_prompts(workload: Workload, source: PromptSource) -> Prompts:
    """Prompts of one row."""
    warmup = [source.take(workload.input_tokens) for _ in range(workload.warmup)]
    timed = [source.take(workload.input_tokens) for _ in range(workload.requests)]
    return Prompts(warmup, timed)
