"""Where texts come from: files, folders, JSON lines, sets of the Hugging Face hub, synthetic recall; and token files.

A source is named by one word: a path, `hf:NAME[:SPLIT[:FIELD]]`, or `recall[:TOKENS]`, each with an optional `@WEIGHT`.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from morph.checkpoint.tokenizer import ChatTokenizer, load_tokenizer
from morph.errors import CorruptFile, InvalidRequest, ModelNotFound, MorphError
from morph.gate.traffic import EXCLUDED, LETTERS, json_lines
from morph.train.recall import RecallFactory
from morph.train.tokens import Ids, TokenSet, load_tokens, merge

log = logging.getLogger(__name__)

DOCUMENT_LINE = "<|doc|>"
"""Separates the documents of a `.txt.gz` corpus."""
TEXT, LINES, IDS = (".txt", ".md", ".rst", ".txt.gz"), (".jsonl", ".jsonl.gz"), (".npz", ".npy")
NEVER = ("eval", "test", "validation")
"""Folders that a walk leaves out: evaluation sets are not trained on."""
RECALL_TOKENS = 4_000_000


@dataclass(frozen=True)
class Document:
    """A text, or a chat, with the answer at its end, if it has one."""

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    answer: str = ""


def parse_source(text: str) -> tuple[str, float]:
    """`SOURCE[@WEIGHT]` as its two parts; the weight is 1 when none is given.

    Raises:
        InvalidRequest: a weight that is no positive number.
    """
    name, at, weight = text.rpartition("@")
    if not at or "/" in weight:
        return text, 1.0
    try:
        value = float(weight)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise InvalidRequest(f"data {text!r}: the weight after @ is {weight!r}; give a positive number")
    return name, value


def vocabulary_digest(tokenizer: ChatTokenizer) -> str:
    """sha256 over all tokens and ids; each version of the library writes the file itself a little differently."""
    vocabulary = sorted(tokenizer.inner.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


class Tokenising:
    """A model's tokenizer as training uses it.

    Attributes:
        fingerprint: digest of the vocabulary with its ids.
        separator: id after every document: `<|endoftext|>` where the vocabulary has it, else the end token.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer: ChatTokenizer = load_tokenizer(folder)
        self.fingerprint = vocabulary_digest(self.tokenizer)
        separator = self.tokenizer.inner.token_to_id("<|endoftext|>")
        ends = self.tokenizer.eos_token_ids
        self.separator: int | None = separator if separator is not None else (ends[0] if ends else None)

    def encode(self, document: Document) -> tuple[list[int], int]:
        """Ids with the separator, and how many of them at the end are the answer."""
        if document.messages and self.tokenizer.chat_template is not None:
            messages = [dict(message) for message in document.messages]
            prompt = self.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
        else:
            text = document.text or "\n\n".join(message["content"] for message in document.messages) + "\n\n"
            prompt = self.tokenizer.encode(text, add_special_tokens=False)
        answer = self.tokenizer.encode(document.answer, add_special_tokens=False) if document.answer else []
        end = [] if self.separator is None else [self.separator]
        return [*prompt, *answer, *end], len(answer) + len(end) if answer else 0


def read_sources(words: Iterable[str], tokenizer_dir: Path, seed: int = 0) -> list[tuple[TokenSet, float]]:
    """Token sets of all sources with their weights; text is tokenised here, token files are read as they are.

    A folder is one source per kind: its token files keep the names of their sets, all its texts are one set.

    Raises:
        ModelNotFound: no such path. InvalidRequest: a source without text. CorruptFile: a file that cannot be read.
    """
    tokenising: Tokenising | None = None
    sets: list[tuple[TokenSet, float]] = []
    for word in words:
        name, weight = parse_source(word)
        files = [] if name.startswith("hf:") or _is_recall(name) else _find(name)
        ids = merge([load_tokens(path) for path in files if _kind(path) == "ids"])
        # A folder's weight is shared by the sets in it, by their size.
        texts = [path for path in files if _kind(path) != "ids"]
        if texts or not files:
            tokenising = tokenising or Tokenising(tokenizer_dir)
            ids.append(_tokenise(name, _documents(name, texts, seed), tokenising))
        total = sum(len(one) for one in ids)
        sets += [(one, weight * len(one) / max(1, total)) for one in ids]
    names = [one.name for one, _ in sets]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InvalidRequest(f"two data sources are named {sorted(twice)[0]!r}; rename one file or folder")
    return sets


def _is_recall(name: str) -> bool:
    return name.split(":")[0] == "recall" and not Path(name).exists()


def _kind(path: Path) -> str | None:
    for kind, endings in (("text", TEXT), ("lines", LINES), ("ids", IDS)):
        if path.name.endswith(endings):
            return kind
    return None


def _find(name: str) -> list[Path]:
    """Files of a path or of a pattern with `*`, `?` or `[`."""
    if Path(name).exists() or not any(char in name for char in "*?["):
        return _files(Path(name))
    found = sorted(Path(match) for match in glob.glob(name))
    if not found:
        raise ModelNotFound(f"no data matches {name}")
    return [file for path in found for file in _files(path)]


def _files(path: Path) -> list[Path]:
    """A file, or the readable files of a folder and its folders, in order."""
    if path.is_file():
        if _kind(path) is None:
            known = ", ".join((*TEXT, *LINES, *IDS))
            raise InvalidRequest(f"data {path} is of a kind that cannot be read; use {known}")
        return [path]
    if not path.is_dir():
        raise ModelNotFound(f"no data at {path}; give a file, a folder, hf:NAME or recall")
    if path.name in NEVER:
        raise InvalidRequest(f"data {path}: a folder named {path.name!r} holds evaluation data; it is not trained on")
    found = []
    for file in sorted(file for file in path.rglob("*") if file.is_file() and _kind(file)):
        inside = file.relative_to(path).parts[:-1]
        stem = file.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".txt")
        if any(part in NEVER for part in inside) or stem in EXCLUDED:
            log.warning("%s is left out: %s", file, "no open licence" if stem in EXCLUDED else "evaluation data")
            continue
        found.append(file)
    if not found:
        raise InvalidRequest(f"data {path} has no file that can be read; want {', '.join((*TEXT, *LINES, *IDS))}")
    return found


def source_name(name: str) -> str:
    """Name of a set in files: of a path its last part without endings."""
    if name.startswith("hf:") or _is_recall(name):
        return name.split(":")[1].replace("/", "_") if name.startswith("hf:") else "recall"
    last = Path(name).resolve().name.replace("*", "").strip("-_.") or "text"
    for ending in (*TEXT, *LINES, *IDS):
        last = last.removesuffix(ending)
    return last.replace(".", "_")


def _tokenise(name: str, documents: Iterator[Document], tokenising: Tokenising) -> TokenSet:
    rows: list[Ids] = []
    answers: list[int] = []
    limit = _recall_tokens(name) if _is_recall(name) else None
    total = 0
    for document in documents:
        ids, answer = tokenising.encode(document)
        # Arrays at once: lists of Python numbers take ten times the memory.
        rows.append(np.asarray(ids, dtype=np.int32))
        answers.append(answer)
        total += len(ids)
        if limit is not None and total >= limit:
            break
    if not total:
        raise InvalidRequest(f"data {name} has no text; name files that have some")
    return TokenSet.of(source_name(name), rows, answers if any(answers) else None, tokenising.fingerprint)


def _recall_tokens(name: str) -> int:
    _, _, count = name.partition(":")
    try:
        return int(float(count)) if count else RECALL_TOKENS
    except ValueError as error:
        raise InvalidRequest(f"data {name!r}: {count!r} is no number of tokens; write e.g. recall:4e6") from error


def _documents(name: str, files: list[Path], seed: int) -> Iterator[Document]:
    if name.startswith("hf:"):
        yield from _hub(name)
    elif _is_recall(name):
        for one in RecallFactory(seed):
            yield Document(one.prompt, answer=one.answer)
    for path in files:
        yield from read_text(path) if _kind(path) == "text" else read_lines(path)


def read_text(path: Path) -> Iterator[Document]:
    """Documents of a text file: separated by a line `<|doc|>`, or the whole file.

    Raises:
        CorruptFile: no UTF-8 text, or no gzip file.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    parts: list[str] = []
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for line in file:
                if line.rstrip("\n") != DOCUMENT_LINE:
                    parts.append(line)
                    continue
                if text := "".join(parts).strip():
                    yield Document(text)
                parts = []
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{path} cannot be read as text ({error}); restore it or leave it out") from error
    if text := "".join(parts).strip():
        yield Document(text)


def read_lines(path: Path) -> Iterator[Document]:
    """Documents of a JSON-lines file. Raises `CorruptFile` for a line without any known field."""
    try:
        for number, row in enumerate(json_lines(path), 1):
            document = row_document(row)
            if document is None:
                raise CorruptFile(
                    f"{path} line {number} has none of the fields text, messages, prompt, question, document; "
                    f"it has {', '.join(sorted(row)) if isinstance(row, dict) else type(row).__name__}"
                )
            yield document
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{path} cannot be read ({error}); restore it or leave it out") from error


def _user(content: str, answer: str = "") -> Document:
    return Document(messages=({"role": "user", "content": content.strip()},), answer=answer.strip())


def row_document(row: Any) -> Document | None:
    """The document of one JSON row, by the fields that it has; None when they are unknown."""
    if not isinstance(row, dict):
        return None
    if isinstance(row.get("text"), str):
        return Document(row["text"])
    if isinstance(row.get("messages"), list):
        messages = tuple({k: str(v) for k, v in m.items()} for m in row["messages"])
        if messages and messages[-1].get("role") == "assistant":
            return Document(messages=messages[:-1], answer=messages[-1].get("content", ""))
        return Document(messages=messages)
    if isinstance(row.get("turns"), list) and row["turns"]:
        return _user(str(row["turns"][0]))
    if "prompt" in row:
        return _user(str(row["prompt"]), str(row.get("completion") or ""))
    if "question" in row:
        return _question(row)
    if "query" in row:
        return _user(f"{row.get('span') or ''}\n\n{row['query']}", str(row.get("summary") or ""))
    if "document" in row:
        if "summary" in row:
            return _user(f"{row['document']}\n\nSummarize this text.", str(row["summary"]))
        return Document(str(row["document"]))
    return None


def _question(row: dict[str, Any]) -> Document:
    context = f"{row['context']}\n\n" if row.get("context") else ""
    content, answer = f"{context}{row['question']}", row.get("answer")
    choices = row.get("choices")
    if isinstance(choices, list) and len(choices) <= len(LETTERS):
        content += "\n" + "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
        if isinstance(answer, int) and 0 <= answer < len(choices):
            answer = f"{LETTERS[answer]}. {choices[answer]}"
    elif isinstance(row.get("answers"), list) and row["answers"]:
        answer = row["answers"][0]
    parts = [str(part) for part in (row.get("rationale"), answer) if part is not None]
    return _user(content, "\n".join(parts))


def _hub(name: str) -> Iterator[Document]:
    """Rows of a set of the Hugging Face hub: `hf:NAME[:SPLIT[:FIELD]]`."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MorphError(f"data {name!r} needs the package datasets; install it with `pip install datasets`") from error
    _, repo, *rest = name.split(":")
    try:
        rows = load_dataset(repo, split=rest[0] if rest and rest[0] else "train", streaming=True)
    except Exception as error:
        # The library raises many kinds for the same thing: the set cannot be had.
        raise ModelNotFound(f"data {name!r} cannot be loaded from the hub ({error})") from error
    for row in rows:
        document = Document(str(row.get(rest[1], ""))) if len(rest) > 1 else row_document(row)
        if document is None:
            raise InvalidRequest(f"data {name!r}: fields are {', '.join(row)}; say which: hf:NAME:SPLIT:FIELD")
        yield document
