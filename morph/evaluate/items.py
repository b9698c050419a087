"""One question to a model, with what a right answer is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from morph.errors import UnsupportedModel


@dataclass(frozen=True)
class Item:
    """A prompt and its references.

    Attributes:
        prompt: raw text before the choices, or the user's message where `chat`.
        choices: answers to score, without the space before them; empty where the model writes an answer.
        gold: index of the right choice.
        references: right answers of a written one, any of them counts.
        max_tokens: of a written answer.
        score: which rule judges a written answer, in sets that mix tasks; a name of `metrics.SCORES`.
        classes: labels to tell apart, for classification.
        stop: strings that end a written answer.
    """

    id: str
    prompt: str
    choices: tuple[str, ...] = ()
    gold: int = 0
    references: tuple[str, ...] = ()
    max_tokens: int = 0
    chat: bool = False
    score: str | None = None
    classes: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


def prompt_tokens(tokenizer: Any, item: Item) -> list[int]:
    """Token ids of the prompt as the engine gets it.

    Raises:
        InvalidRequest: the tokenizer has no chat format and the item needs one.
    """
    if not item.chat:
        ids: list[int] = tokenizer.encode(item.prompt)
        return ids
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": item.prompt}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids


PROBE = "The quick brown fox: 1, 2, 3? Yes!\nNo."


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Refuse a tokenizer that is not the model's, before hours of scores that mean nothing.

    Raises:
        UnsupportedModel: it loses text, or makes tokens that the model does not have.
    """
    ids = tokenizer.encode(PROBE, add_special_tokens=False)
    top = max(ids, default=0)
    if top >= vocab_size:
        raise UnsupportedModel(
            f"the tokenizer makes token {top}, the model has {vocab_size}; it belongs to another model: restore "
            "tokenizer.json of this one"
        )
    back = tokenizer.decode(ids)
    if "".join(back.split()).lower() != "".join(PROBE.split()).lower():
        raise UnsupportedModel(
            f"the tokenizer turns {PROBE!r} into {back!r}; it belongs to another model or is damaged: restore "
            "tokenizer.json of this one"
        )
