"""The base of a conversion: which files it is made of, and how a Morph folder refers to them."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from morph.checkpoint import ModelSource, open_model
from morph.checkpoint.digest import sha256_of
from morph.convert.folder import link_or_copy
from morph.errors import UnsupportedModel
from morph.hub import resolve_model

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Base:
    """A model to convert.

    Attributes:
        source: its tensors. name: for the new folder's name. licence: None = unknown.
        reference: `base` entry of the new `config.json`, without checksum.
        files: files of the base, with their place in a model folder.
    """

    source: ModelSource
    name: str
    licence: str | None
    reference: dict[str, Any]
    files: tuple[tuple[Path, str], ...]

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(path.stat().st_size for path, _ in self.files)

    def digest(self) -> str:
        """sha256 of a single file; of several files, of their names and digests."""
        if self.reference["kind"] == "gguf":
            return sha256_of(self.files[0][0])
        listing = "".join(f"{sha256_of(path)}  {place}\n" for path, place in self.files)
        return hashlib.sha256(listing.encode()).hexdigest()


def open_base(name_or_path: str) -> Base:
    """A Hugging Face folder, a GGUF file, or a Morph folder or name, of which the base is taken.

    Raises:
        ModelNotFound, CorruptFile, UnsupportedModel: it cannot be opened.
    """
    path = resolve_model(name_or_path)
    source = open_model(path)
    name = str(source.meta.get("name") or path.name)
    if path.is_file():
        reference = {"kind": "gguf", "file": f"base/{path.name}", "source": path.name}
        return Base(source, name, None, reference, ((path, f"base/{path.name}"),))
    if source.meta.get("model_type") != "morph":
        files = (path / "config.json", *_weights(path))
        reference = {"kind": "safetensors", "file": "base", "source": path.resolve().name}
        return Base(source, name, _licence(path), reference, tuple((file, f"base/{file.name}") for file in files))
    reference = dict(source.meta.get("base") or {})
    if not reference:
        raise UnsupportedModel(
            f"{path} holds its weights itself and has no separate base; convert the model that it was made from"
        )
    place = Path(str(reference["file"]))
    inside = path / place
    files = (inside,) if inside.is_file() else (inside / "config.json", *_weights(inside))
    placed = tuple((file, file.relative_to(path).as_posix()) for file in files)
    return Base(source, name, source.meta.get("licence"), reference, placed)


def place_base(base: Base, folder: Path) -> None:
    """Put the base's files and tokenizer into a model folder, by hard link where possible."""
    for path, place in base.files:
        link_or_copy(path, folder / place)
    place_tokenizer(base.source.tokenizer_dir, folder)


def place_tokenizer(origin: Path, folder: Path) -> None:
    """Copy what belongs to a tokenizer, as far as it is there."""
    for name in TOKENIZER_FILES:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
    for file in sorted((origin / "additional_chat_templates").glob("*.jinja")):
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        shutil.copyfile(file, folder / "additional_chat_templates" / file.name)


def _weights(folder: Path) -> tuple[Path, ...]:
    """Weight files of a Hugging Face folder."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return (index, *sorted(folder.glob("model-*.safetensors")))
    return (folder / "model.safetensors",)


def _licence(folder: Path) -> str | None:
    """What the model card's header says."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    found = re.search(r"^license:\s*(\S+)\s*$", card.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return found[1] if found else None
