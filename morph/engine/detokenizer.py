"""Tokens to text as they come, with stop strings held back."""

from __future__ import annotations

from typing import Protocol

MAX_WINDOW = 12
"""Tokens that are decoded again with each new one, at most (more only while a character is incomplete)."""


class Decoder(Protocol):
    """The one method of a tokenizer that detokenization needs."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of the token ids."""
        ...


class Detokenizer:
    """Turns one request's tokens into text step by step.

    A token can end inside a UTF-8 character, and its text can depend on the tokens before it; so each step decodes
    a short window of the last tokens and takes what it adds to the window's text, once it is whole.
    Text that may be the beginning of a stop string is kept back until it is decided.
    """

    def __init__(self, tokenizer: Decoder, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._window = 0
        self._read = 0
        self._before = ""  # text of the window as far as it is in `_decoded`
        self._decoded = ""
        self.text = ""
        """Text that is safe to hand out."""

    def push(self, token: int) -> str | None:
        """Add a token; the stop string that it completes, or None. Text after a stop string is cut off."""
        self._ids.append(token)
        after = self._tokenizer.decode(self._ids[self._window :])
        if len(after) > len(self._before) and not after.endswith("\ufffd"):
            new = after[len(self._before) :]
            if len(self._ids) - self._window < MAX_WINDOW:
                self._before = after
            else:
                # It begins with a whole character, never inside one.
                self._window = self._read
                self._before = self._tokenizer.decode(self._ids[self._window :])
            self._read = len(self._ids)
            return self._extend(new)
        return None

    def _extend(self, new: str) -> str | None:
        searched = len(self._decoded)
        self._decoded += new
        found = None
        cut = len(self._decoded)
        for stop in self._stop:
            at = self._decoded.find(stop, max(0, searched - len(stop) + 1))
            if at != -1 and at < cut:
                found, cut = stop, at
        if found is not None:
            self.text = self._decoded[:cut]
            return found
        self.text = self._decoded[: len(self._decoded) - self._held_back()]
        return None

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._decoded)), longest, -1):
                if self._decoded.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def finish(self, stopped: bool) -> None:
        """No more tokens: hand out what was kept back, unless a stop string cut it off."""
        if stopped:
            return
        after = self._tokenizer.decode(self._ids[self._window :])
        self._decoded += after[len(self._before) :]
        self.text = self._decoded
