"""Layout: which mixer each block runs for one request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from morph.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Layout:
    """One choice per block, block 0 first; `True` (written `1`) = attention, `False` (`0`) = ssm."""

    bits: tuple[bool, ...]

    @classmethod
    def parse(cls, text: str, num_blocks: int) -> Layout:
        """Read a bit string of `num_blocks` characters, or the words `attention` and `ssm`.

        Raises:
            InvalidRequest: wrong length or alphabet.
        """
        if text == "attention":
            return cls.attention(num_blocks)
        if text == "ssm":
            return cls.ssm(num_blocks)
        for block, char in enumerate(text):
            if char not in "01":
                raise InvalidRequest(
                    f"layout {text!r} has a character other than 0 and 1 at block {block}; "
                    f"use 'auto', 'attention', 'ssm' or {num_blocks} characters of 0 and 1",
                    "layout",
                )
        if len(text) != num_blocks:
            raise InvalidRequest(
                f"layout {text!r} has {len(text)} blocks, the model has {num_blocks}; give one character per block",
                "layout",
            )
        return cls(tuple(char == "1" for char in text))

    @classmethod
    def attention(cls, num_blocks: int) -> Layout:
        """The base model."""
        return cls((True,) * num_blocks)

    @classmethod
    def ssm(cls, num_blocks: int) -> Layout:
        """No attention at all."""
        return cls((False,) * num_blocks)

    @classmethod
    def from_bits(cls, bits: Iterable[bool | int]) -> Layout:
        """From any iterable of truth values, block 0 first."""
        return cls(tuple(bool(bit) for bit in bits))

    @property
    def attention_blocks(self) -> int:
        """How many blocks run attention."""
        return sum(self.bits)

    @property
    def attention_share(self) -> float:
        """Attention blocks over all blocks, 0…1."""
        return self.attention_blocks / len(self.bits) if self.bits else 0.0

    def __str__(self) -> str:
        return "".join("1" if bit else "0" for bit in self.bits)

    def __len__(self) -> int:
        return len(self.bits)

    def __iter__(self) -> Iterator[bool]:
        return iter(self.bits)

    def __getitem__(self, block: int) -> bool:
        return self.bits[block]
