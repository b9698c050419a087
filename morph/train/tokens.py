"""Token sets: what training reads. One file of token ids with document ends, or several shards of one."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from morph.errors import CorruptFile, InvalidRequest

Ids = npt.NDArray[np.integer[Any]]
SHARD_VERSION = 1


@dataclass(frozen=True)
class TokenSet:
    """Documents as one array of ids.

    Attributes:
        tokens: ids of all documents in a row, separators included.
        ends: index after the last token of each document, ascending.
        answer: uint8 per token, 1 = part of an answer; None where nothing is marked.
        tokenizer: digest of the vocabulary that made the ids; None = unknown.
    """

    name: str
    tokens: Ids
    ends: npt.NDArray[np.int64]
    answer: npt.NDArray[np.uint8] | None = None
    tokenizer: str | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(
        cls,
        name: str,
        documents: Iterable[Sequence[int] | Ids],
        answers: Sequence[int] | None = None,
        tokenizer: str | None = None,
    ) -> TokenSet:
        """From lists of ids.

        Args:
            answers: for each document, how many tokens at its end are the answer.
        """
        arrays = [np.asarray(document, dtype=np.int32) for document in documents]
        tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
        ends = np.cumsum([len(array) for array in arrays], dtype=np.int64)
        marks = None
        if answers is not None:
            marks = np.zeros(len(tokens), np.uint8)
            for end, count in zip(ends, answers, strict=True):
                marks[end - count : end] = 1
        return cls(name, narrow(tokens), ends, marks, tokenizer)

    def check(self, vocab_size: int, tokenizer: str | None) -> None:
        """Refuse ids that this model cannot have.

        Raises:
            InvalidRequest: no tokens, ids beyond the vocabulary, or ids of another tokenizer.
        """
        if not len(self.tokens):
            raise InvalidRequest(f"data {self.name} has no tokens; name files that have text")
        if self.tokenizer and tokenizer and self.tokenizer != tokenizer:
            raise InvalidRequest(
                f"data {self.name} was tokenised by another tokenizer ({self.tokenizer[:12]}…, the model's is "
                f"{tokenizer[:12]}…); prepare it again with this model"
            )
        low, high = int(self.tokens.min()), int(self.tokens.max())
        if low < 0 or high >= vocab_size:
            raise InvalidRequest(
                f"data {self.name} has token id {high if high >= vocab_size else low}, the model's vocabulary has "
                f"{vocab_size} entries; prepare it again with this model"
            )


def narrow(tokens: Ids) -> Ids:
    """The same ids in 16 bits where they fit."""
    fits = not len(tokens) or (tokens.min() >= 0 and tokens.max() < 2**16)
    return tokens.astype(np.uint16) if fits else tokens.astype(np.int32)


def save_shards(tokens: TokenSet, folder: Path, shard_bytes: int) -> list[Path]:
    """Write `NAME-00001.npz`, … of about `shard_bytes` of token ids each, compressed; documents stay whole.

    Raises:
        OSError: the disk is full, e.g.; no half-written shard is left.
    """
    limit = max(1, shard_bytes // tokens.tokens.itemsize)
    cuts, begin = [0], 0
    for index, end in enumerate(tokens.ends.tolist()):
        if end - begin > limit and index > cuts[-1]:
            cuts.append(index)
            begin = int(tokens.ends[index - 1])
    cuts.append(len(tokens.ends))
    paths = []
    for number, (first, last) in enumerate(itertools.pairwise(cuts), 1):
        low = int(tokens.ends[first - 1]) if first else 0
        high = int(tokens.ends[last - 1]) if last else 0
        arrays: dict[str, Any] = {"tokens": tokens.tokens[low:high], "ends": tokens.ends[first:last] - low}
        if tokens.answer is not None:
            arrays["answer"] = tokens.answer[low:high]
        label = {"version": SHARD_VERSION, "name": tokens.name, "tokenizer": tokens.tokenizer}
        arrays["label"] = np.frombuffer(json.dumps(label).encode(), dtype=np.uint8)
        path = folder / f"{tokens.name}-{number:05d}.npz"
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, **arrays)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        paths.append(path)
    return paths


def load_tokens(path: Path) -> TokenSet:
    """A shard, a file of requests with answers (`morph.gate.answers.Requests`), or a plain `.npy` of ids.

    Raises:
        CorruptFile: not one of the three.
    """
    try:
        if path.suffix == ".npy":
            ids = np.load(path, allow_pickle=False)
            if ids.ndim != 1 or ids.dtype.kind not in "ui":
                raise CorruptFile(f"{path} has shape {ids.shape} of {ids.dtype}, want one row of integer token ids")
            return TokenSet(path.stem, ids, np.array([len(ids)], np.int64))
        with np.load(path, allow_pickle=False) as file:
            if "prompts" in file and "answers_lengths" in file:
                return _requests(path, file)
            label = json.loads(file["label"].tobytes())
            if label.get("version") != SHARD_VERSION:
                raise CorruptFile(f"{path} is of shard version {label.get('version')!r}; prepare it again")
            answer = file.get("answer")
            return TokenSet(label["name"], file["tokens"], file["ends"], answer, label.get("tokenizer"))
    except (OSError, KeyError, ValueError, EOFError, AttributeError) as error:
        raise CorruptFile(f"{path} is no file of token ids ({error}); prepare it again") from error


def _requests(path: Path, file: Any) -> TokenSet:
    """Prompts followed by their answers; the answers are marked."""
    prompts, answers = (
        np.split(file[name], np.cumsum(file[f"{name}_lengths"])[:-1]) for name in ("prompts", "answers")
    )
    documents = [np.concatenate(pair) for pair in zip(prompts, answers, strict=True)]
    return TokenSet.of(path.stem, documents, [len(answer) for answer in answers])


def merge(sets: Sequence[TokenSet]) -> list[TokenSet]:
    """Shards of the same name as one set; the order of names is that of their first shard."""
    groups: dict[str, list[TokenSet]] = {}
    for one in sets:
        groups.setdefault(one.name, []).append(one)
    merged = []
    for name, parts in groups.items():
        if len({part.tokenizer for part in parts}) > 1:
            raise InvalidRequest(f"shards of {name} come from different tokenizers; prepare them together")
        offsets = np.cumsum([0, *(len(part) for part in parts[:-1])])
        ends = np.concatenate([part.ends + offset for part, offset in zip(parts, offsets, strict=True)])
        answer = None
        if any(part.answer is not None for part in parts):
            answer = np.concatenate(
                [np.zeros(len(part), np.uint8) if part.answer is None else part.answer for part in parts]
            )
        tokens = narrow(np.concatenate([part.tokens for part in parts]))
        merged.append(replace(parts[0], tokens=tokens, ends=ends, answer=answer))
    return merged
