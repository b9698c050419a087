"""Log probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from morph.engine.params import TokenLogprob
from morph.server.interface import Tokenizer, text_of

LEAST = -9999.0
"""JSON has no -inf."""


class Pieces:
    """Text of single tokens, with the leading space that a tokenizer strips from the first token of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = list(tokenizer.encode("a", add_special_tokens=False))
        self._anchor_chars = len(text_of(tokenizer, self._anchor))
        self._texts: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = text_of(self._tokenizer, [*self._anchor, token])[self._anchor_chars :]
            self._texts[token] = text
        return text


def chat_logprobs(pieces: Pieces, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        text = pieces[token]
        # A token that is part of a character has bytes that its text does not show.
        data = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": data}

    content = [
        {
            **item(entry.token_id, entry.logprob),
            "top_logprobs": [item(token, value) for token, value in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    pieces: Pieces, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], offset: int
) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion.

    Args:
        token_ids: one per entry; an entry is None where nothing precedes the token.
        offset: characters of the choice's text before the first of them.
    """
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entry in zip(token_ids, entries, strict=True):
        text = pieces[token]
        result["tokens"].append(text)
        result["text_offset"].append(offset)
        offset += len(text)
        if entry is None:
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        result["token_logprobs"].append(max(entry.logprob, LEAST))
        top: dict[str, float] = {}
        for other, value in (*entry.top, (token, entry.logprob)):
            # Two tokens can have the same text; the likelier comes first and stays.
            top.setdefault(pieces[other], max(value, LEAST))
        result["top_logprobs"].append(top)
    return result
