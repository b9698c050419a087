"""Text to tokens and back, and conversations to text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from morph.errors import CorruptFile


class ChatTokenizer:
    """A Hugging Face fast tokenizer with plain return types."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text."""
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of the token ids, spaces left as they are."""
        return str(
            self.inner.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool = False, add_generation_prompt: bool = True
    ) -> Any:
        """The conversation in the model's chat format, as text (or ids with `tokenize`)."""
        text = self.inner.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Vocabulary entries of the ids."""
        return list(self.inner.convert_ids_to_tokens(ids))

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, None when it has none."""
        template = self.inner.chat_template
        return None if template is None else str(template)

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, added tokens included."""
        return len(self.inner)


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """The tokenizer of a model folder.

    Raises:
        CorruptFile: no readable tokenizer there.
    """
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        raise CorruptFile(f"{folder} has no tokenizer.json; fetch the model again with `morph pull --force NAME`")
    try:
        return ChatTokenizer(PreTrainedTokenizerFast.from_pretrained(folder))
    except Exception as error:
        raise CorruptFile(f"the tokenizer in {folder} cannot be read: {error}") from error
