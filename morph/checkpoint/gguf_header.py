"""The front part of a GGUF file: fields and where the tensors lie.

`gguf.GGUFReader` makes several numpy arrays per string, which costs seconds and hundreds of MB for a vocabulary;
here strings are walked over and decoded only when asked for.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from morph.checkpoint.remedy import FETCH_AGAIN
from morph.errors import CorruptFile, UnsupportedModel

VERSIONS = (2, 3)
DAMAGE = (ValueError, struct.error, OverflowError, RecursionError)
"""What reading lengths and text from arbitrary bytes raises."""

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct format."""


@dataclass(frozen=True)
class ArrayField:
    """An array that has not been read: type and number of its items, and where they begin."""

    kind: int
    count: int
    offset: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file.

    Attributes:
        shape: slowest dimension first, as numpy and torch have it.
        kind: number of the ggml type.
        offset: bytes from the beginning of the tensor data.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFHeader:
    """Fields and tensor entries of a file, over one read-only mapping.

    Attributes:
        tensors: by name in the file.
        data_start: where the tensor data begins, bytes.
        map: the whole file.

    Raises:
        CorruptFile: no GGUF file, or one that ends inside the header.
        UnsupportedModel: a version of the format other than 2 and 3, or big-endian.
    """

    def __init__(self, path: Path, remedy: str = FETCH_AGAIN) -> None:
        self.path, self.remedy = path, remedy
        self._fields: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        try:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read()
        except (*DAMAGE, OSError) as error:
            raise CorruptFile(f"{path} is not a whole GGUF file ({error}); {remedy}") from error

    def get(self, key: str, default: Any = None) -> Any:
        """A field as a plain value, arrays as lists; the default when the file lacks it.

        Raises:
            CorruptFile: an array holds text that is not UTF-8.
        """
        value = self._fields.get(key, default)
        if not isinstance(value, ArrayField):
            return value
        try:
            return self._items(value.kind, value.count, value.offset, keep=True)[0]
        except DAMAGE as error:
            raise CorruptFile(f"{self.path}: field {key} cannot be read ({error}); {self.remedy}") from error

    def fields_digest(self) -> str:
        """sha256 hex digest of all fields (not the tensors): changes when the tokenizer does."""
        return hashlib.sha256(self.map[24 : self._fields_end]).hexdigest()

    # ---- reading

    def _read(self) -> None:
        if self.map[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, tensors, fields = self._unpack("IQQ", 4)
        if version not in VERSIONS:
            what = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise UnsupportedModel(f"{self.path}: GGUF {what} is not supported; convert it to version 3")
        at = 24
        for _ in range(fields):
            key, at = self._string(at)
            (kind,) = self._unpack("I", at)
            self._fields[key], at = self._value(kind, at + 4)
        self._fields_end = at
        for _ in range(tensors):
            name, at = self._string(at)
            (dims,) = self._unpack("I", at)
            shape = self._unpack(f"{dims}Q", at + 4)
            kind, offset = self._unpack("IQ", at + 4 + 8 * dims)
            at += 16 + 8 * dims
            if name in self.tensors:
                raise ValueError(f"tensor {name} is there twice")
            self.tensors[name] = TensorEntry(name, tuple(reversed(shape)), kind, offset)
        alignment = self._fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        self.data_start = -(-at // alignment) * alignment

    def _unpack(self, layout: str, at: int) -> tuple[Any, ...]:
        return struct.unpack_from("<" + layout, self.map, at)

    def _string(self, at: int) -> tuple[str, int]:
        (size,) = self._unpack("Q", at)
        end = at + 8 + size
        if end > len(self.map):
            raise ValueError(f"a string of {size} bytes at {at} reaches beyond the end")
        return self.map[at + 8 : end].decode("utf-8"), end

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind == STRING:
            return self._string(at)
        if kind == ARRAY:
            item, count = self._unpack("IQ", at)
            _, end = self._items(item, count, at + 12, keep=False)
            return ArrayField(item, count, at + 12), end
        if kind not in SCALARS:
            raise ValueError(f"field type {kind} at {at} is unknown")
        (value,) = self._unpack(SCALARS[kind], at)
        return value, at + struct.calcsize("<" + SCALARS[kind])

    def _items(self, kind: int, count: int, at: int, keep: bool) -> tuple[list[Any], int]:
        """Items of an array from `at`, and where it ends; without `keep` the list stays empty."""
        if kind in SCALARS:
            end = at + count * struct.calcsize("<" + SCALARS[kind])
            if end > len(self.map):
                raise ValueError(f"an array of {count} items at {at} reaches beyond the end")
            return (list(self._unpack(f"{count}{SCALARS[kind]}", at)) if keep else []), end
        items = []
        unpack, data = struct.Struct("<Q").unpack_from, self.map
        for _ in range(count):
            if kind == STRING and not keep:
                at += 8 + unpack(data, at)[0]
            else:
                value, at = self._value(kind, at)
                if keep:
                    items.append(value)
        return items, at
