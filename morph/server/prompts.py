"""From request text to token ids, off the event loop so that one long prompt does not stall the others."""

from __future__ import annotations

import asyncio
from typing import Any

from morph.errors import InvalidRequest, MorphError
from morph.server.errors import bad_request
from morph.server.interface import ServedEngine, Tokenizer

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Accepted roles -> the role that chat templates know."""


async def encode(engine: ServedEngine, prompt: str | list[int]) -> list[int]:
    """Token ids of a completion prompt.

    Raises:
        ApiError: 400, empty.
    """
    ids: list[int] = []
    if isinstance(prompt, list):
        ids = list(prompt)
    elif prompt:
        ids = await encode_text(engine, prompt)
    if not ids:
        raise bad_request("the prompt is empty; give at least one token", "prompt", "empty_prompt")
    return ids


async def encode_text(engine: ServedEngine, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text, which may be empty."""
    return await asyncio.to_thread(_encode_text, engine.tokenizer, text, add_special_tokens)


async def encode_chat(
    engine: ServedEngine, messages: list[dict[str, Any]], add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of a conversation in the model's chat format.

    Raises:
        ApiError: 400, a message that is malformed.
        InvalidRequest: the model's template refuses the messages.
    """
    plain = [_plain_message(index, message) for index, message in enumerate(messages)]
    if not plain:
        raise bad_request("messages is empty; give at least one message", "messages", "empty_prompt")
    return await asyncio.to_thread(chat_prompt, engine.tokenizer, plain, add_generation_prompt)


def _encode_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def chat_prompt(tokenizer: Tokenizer, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
    """Token ids of messages with a role and a text each, in the model's chat format.

    Raises:
        InvalidRequest: the model's template refuses the messages.
    """
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except MorphError as error:
        raise InvalidRequest(str(error), "prompt") from None
    except Exception as error:
        # A template is the model author's code: whatever it raises means "I cannot render this".
        raise InvalidRequest(
            f"the model's chat template refuses the messages: {error}; change them or use plain completions",
            "prompt",
        ) from None
    # The template has written the special tokens already.
    return _encode_text(tokenizer, text, False)


def _plain_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """Role and text of one message; everything that is not text is refused."""
    where = f"messages.{index}"
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(f"{where}.role is {role!r}; use {', '.join(ROLES)}", f"{where}.role")
    for key, value in message.items():
        if key not in ("role", "content", "name") and value not in (None, [], ""):
            raise bad_request(f"{where}.{key} is not supported; send role and content", f"{where}.{key}")
    return {"role": ROLES[role], "content": _text(f"{where}.content", message.get("content"))}


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        kind = "missing" if content is None else f"a {type(content).__name__}"
        raise bad_request(f"{where} is {kind}; use a string or a list of text parts", where)
    texts = []
    for index, part in enumerate(content):
        what = part.get("type") if isinstance(part, dict) else None
        if what != "text" or not isinstance(part.get("text"), str):
            raise bad_request(f"{where}.{index} is of type {what!r}; only text is supported", f"{where}.{index}")
        texts.append(part["text"])
    return "".join(texts)
