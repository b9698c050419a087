"""Constrained answers: JSON, regular expressions and grammars through llguidance.

A constraint belongs to one request. It says which tokens may come next and follows the tokens that came; it knows
nothing of batches. Preemption does not touch it: tokens that were made stay made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from morph.errors import InvalidRequest

LARGEST_GRAMMAR = 1_000_000
"""Characters of a schema, expression or grammar."""

WHITESPACE = r"[ \n]{0,32}"
"""Between the parts of JSON: room for indentation, but a model that loves spaces comes to an end."""


@dataclass(frozen=True)
class Grammar:
    """What an answer must match.

    Attributes:
        kind: `json` (a JSON schema as JSON text), `regex`, or `lark` (llguidance's dialect of Lark).
        text: the schema, expression or grammar.
        param: request field that it came from, for messages.
    """

    kind: Literal["json", "regex", "lark"]
    text: str
    param: str = "grammar"

    @classmethod
    def json_schema(cls, schema: Any, param: str = "response_format") -> Grammar:
        """Of a schema as Python objects; `{"type": "object"}` is any JSON object."""
        return cls("json", json.dumps(schema), param)


class Constraint:
    """The state of one request's grammar.

    Args:
        matcher: at the beginning of the answer.
        vocab: tokens of the model's head.
    """

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._bits = np.zeros(-(-vocab // 32), dtype=np.uint32)

    def mask_(self, logits: torch.Tensor) -> None:
        """Set the logits `[vocab]` of all tokens that may not come next to -inf."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab].astype(bool)
        logits[torch.from_numpy(~allowed).to(logits.device)] = -torch.inf

    def accept(self, token: int) -> None:
        """Go on by a token that the mask allowed."""
        self._matcher.consume_token(token)

    @property
    def finished(self) -> bool:
        """True when nothing more may come."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """What went wrong inside the matcher, e.g. a grammar that grew beyond its limits."""
        return str(self._matcher.get_error()) if self._matcher.is_error() else None


class Grammars:
    """Makes constraints for one tokenizer.

    Args:
        tokenizer: a `morph.checkpoint.tokenizer.ChatTokenizer`.
        vocab: tokens of the model's head.
        eos: token ids that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, eos

    @cached_property
    def _known(self) -> LLTokenizer:
        inner = getattr(self._tokenizer, "inner", None)
        if inner is None or not self._eos:
            raise InvalidRequest("this model's tokenizer cannot be constrained to a grammar; leave the format out")
        return LLTokenizer(inner.to_str(), n_vocab=self._vocab, eos_token=self._eos[0])

    def start(self, grammar: Grammar) -> Constraint:
        """A fresh constraint.

        Raises:
            InvalidRequest: the schema, expression or grammar is not one, or is not supported.
        """
        if len(grammar.text) > LARGEST_GRAMMAR:
            raise InvalidRequest(
                f"{grammar.param} has {len(grammar.text)} characters, the limit is {LARGEST_GRAMMAR}", grammar.param
            )
        try:
            if grammar.kind == "json":
                made = LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": WHITESPACE})
            elif grammar.kind == "regex":
                made = LLMatcher.grammar_from_regex(grammar.text)
            else:
                made = LLMatcher.grammar_from_lark(grammar.text)
            matcher = LLMatcher(self._known, made, log_level=0)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"{grammar.param} cannot be used: {error}", grammar.param) from None
        if matcher.is_error():
            raise InvalidRequest(f"{grammar.param} cannot be used: {matcher.get_error()}", grammar.param)
        return Constraint(matcher, self._vocab)
