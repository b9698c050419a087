"""Text to tokens and back, and conversations to text.

On `tokenizers` and jinja alone: importing transformers for the same results costs more memory than a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from morph.checkpoint.chat_template import ChatTemplate
from morph.checkpoint.hf_folder import read_json
from morph.checkpoint.remedy import FETCH_AGAIN
from morph.errors import CorruptFile, InvalidRequest

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Named tokens of `tokenizer_config.json` that templates can refer to."""


class ChatTokenizer:
    """The tokenizer of a model folder; all methods are thread-safe.

    Args:
        inner: the tokenizer proper.
        special: text of the named special tokens.
        templates: chat templates by name; `default` is the plain one.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(
        self,
        inner: Tokenizer,
        special: dict[str, str] | None = None,
        templates: dict[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.inner = inner
        self.special = dict(special or {})
        self.eos_token_ids = tuple(eos_token_ids)
        self._templates = dict(templates or {})
        self._compiled: dict[str, ChatTemplate] = {}
        # What a folder may ask for when training would cut prompts in silence here.
        inner.no_truncation()
        inner.no_padding()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text; with `add_special_tokens` the tokenizer's own begin and end tokens around them."""
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the token ids, spaces left as they are."""
        return str(self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> Any:
        """The conversation in the model's chat format, as text (or ids with `tokenize`).

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the messages.
        """
        template = self._template("tool_use" if tools and "tool_use" in self._templates else "default")
        text = template.render(conversation, add_generation_prompt, tools, **variables)
        # The template has written the special tokens already.
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Vocabulary entries of the ids, None where there is none."""
        return [self.inner.id_to_token(number) for number in ids]

    def token_bytes(self, number: int) -> bytes:
        """The bytes that a token stands for, whole characters or not; special tokens as their text.

        Raises:
            InvalidRequest: no such token.
        """
        token = self.inner.id_to_token(number)
        if token is None:
            raise InvalidRequest(f"token id {number} is not in the vocabulary of {self.vocab_size}")
        if number in self._added:
            return self._added[number].encode()
        if self._byte_of is not None and all(char in self._byte_of for char in token):
            return bytes(self._byte_of[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, None when it has none."""
        return self._templates.get("default")

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, added tokens included."""
        return int(self.inner.get_vocab_size(with_added_tokens=True))

    @cached_property
    def _added(self) -> dict[int, str]:
        return {number: token.content for number, token in self.inner.get_added_tokens_decoder().items()}

    @cached_property
    def _byte_of(self) -> dict[str, int] | None:
        """GPT-2's character for each byte, or None in a vocabulary that is not byte-level."""
        if "ByteLevel" not in repr(self.inner.decoder):
            return None
        printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = [byte for byte in range(256) if byte not in printable]
        table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
        assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
        return table

    def _template(self, name: str) -> ChatTemplate:
        if name not in self._templates:
            raise InvalidRequest("the model has no chat template; use plain completions", "messages")
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._templates[name], self.special)
        return self._compiled[name]


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """The tokenizer of a model folder.

    Raises:
        CorruptFile: no readable tokenizer there.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CorruptFile(f"{folder} has no tokenizer.json; {FETCH_AGAIN}")
    try:
        inner = Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises plain Exception for everything.
        raise CorruptFile(f"{file} cannot be read ({error}); {FETCH_AGAIN}") from error
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config |= read_json(folder / name)
    special = {key: _text(config[key]) for key in SPECIAL if config.get(key) is not None}
    ends = [inner.token_to_id(special["eos_token"])] if "eos_token" in special else []
    if (folder / "generation_config.json").is_file():
        listed = read_json(folder / "generation_config.json").get("eos_token_id")
        ends += listed if isinstance(listed, list) else [listed]
    eos = tuple(dict.fromkeys(int(end) for end in ends if end is not None))
    return ChatTokenizer(inner, special, _templates(folder, config), eos)


def _text(token: Any) -> str:
    """Text of a special token, which may be written with its attributes."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; files of their own come before `tokenizer_config.json`."""
    stored = config.get("chat_template")
    if isinstance(stored, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in stored}
    elif isinstance(stored, dict):
        templates = {str(name): str(template) for name, template in stored.items()}
    else:
        templates = {} if stored is None else {"default": str(stored)}
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates
