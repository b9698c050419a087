"""One face for every kind of model on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from morph.checkpoint.gguf_file import GGUFFile
from morph.checkpoint.gguf_tokenizer import cached_tokenizer
from morph.checkpoint.hf_folder import open_hf_folder, read_json
from morph.checkpoint.remedy import FETCH_AGAIN, pull_again
from morph.checkpoint.safetensors_file import SafetensorsFiles
from morph.checkpoint.shapes import base_shapes, delta_shapes
from morph.config import FORMAT_VERSION, ModelConfig
from morph.errors import CorruptFile, ModelNotFound, UnsupportedModel
from morph.model.rope import inverse_frequencies

UNUSED = ("lm_head.weight", "rotary_emb.inv_freq")
"""Ends of names that checkpoints carry without need: a tied head stored again, tables that are computed."""


class TensorReader(Protocol):
    """Tensors by their Hugging Face or Morph names."""

    def names(self) -> list[str]:
        """Names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One tensor, dequantised."""
        ...


class ModelSource:
    """A model on disk: its shape, its metadata and its tensors, one at a time.

    Attributes:
        config: shape.
        meta: `config.json` of a Morph folder, else a minimum with the name.
        tokenizer_dir: folder with `tokenizer.json`; of a Morph folder, the folder itself.

    Raises:
        CorruptFile: a tensor is missing or its shape is not what the config says.
        UnsupportedModel: tensors that no model of this shape has.
    """

    def __init__(
        self,
        config: ModelConfig,
        meta: dict[str, Any],
        readers: Sequence[TensorReader],
        tokenizer_dir: Path,
        where: Path,
        remedy: str = FETCH_AGAIN,
    ) -> None:
        self.config, self.meta, self.tokenizer_dir = config, meta, tokenizer_dir
        self._where, self._remedy = where, remedy
        # Later readers win: a delta may replace a tensor of the base.
        self._readers = {name: reader for reader in readers for name in reader.names()}
        self._check()

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._readers)

    def has(self, name: str) -> bool:
        """True when the model has the tensor."""
        return name in self._readers

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it. Raises `CorruptFile` when it is missing."""
        return self._reader(name).shape(name)

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One tensor, dequantised; it may be a read-only view of the file.

        Raises:
            CorruptFile: the model lacks it.
        """
        return self._reader(name).get(name, dtype)

    def _reader(self, name: str) -> TensorReader:
        reader = self._readers.get(name)
        if reader is None:
            raise CorruptFile(f"{self._where} has no tensor {name!r}; {self._remedy}")
        return reader

    def _check(self) -> None:
        expected = base_shapes(self.config) | delta_shapes(self.config)
        missing = [name for name in expected if name not in self._readers]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CorruptFile(f"{self._where} has no tensor {missing[0]!r}{more}; {self._remedy}")
        for name, shape in expected.items():
            found = self.shape(name)
            if found != shape:
                raise CorruptFile(
                    f"{self._where}: tensor {name!r} has shape {found}, the config wants {shape}; {self._remedy}"
                )
        strange = [
            name
            for name in self._readers
            if name not in expected and ".gate.fc" not in name and not name.endswith(UNUSED)
        ]
        if strange:
            raise UnsupportedModel(
                f"{self._where}: tensor {strange[0]!r} has no place in this model, so leaving it out would change "
                "the results; use a model without it"
            )


def open_model(path: str | os.PathLike[str]) -> ModelSource:
    """Open a Morph folder, a Hugging Face folder or a GGUF file. Reads headers only; tensors come when asked for.

    Raises:
        ModelNotFound: nothing there.
        CorruptFile, UnsupportedModel: cannot be read.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        file = GGUFFile(path)
        source = ModelSource(file.config, {"name": path.stem}, [file], path.parent, path)
        # Last, so that no tokenizer is kept for a file that cannot be used.
        source.tokenizer_dir = cached_tokenizer(file)
        return _checked_rope(source, path)
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"no model at {path}: neither a .gguf file nor a folder with config.json")
    meta = read_json(path / "config.json")
    if meta.get("model_type") == "morph":
        return _checked_rope(_open_morph(path, meta), path)
    config, files = open_hf_folder(path)
    return _checked_rope(ModelSource(config, {"name": path.resolve().name}, [files], path, path), path)


def _open_morph(path: Path, meta: dict[str, Any]) -> ModelSource:
    version = meta.get("format_version")
    if version != FORMAT_VERSION:
        raise UnsupportedModel(f"{path}: format version {version!r}, this Morph reads {FORMAT_VERSION}; update it")
    name, revision = meta.get("name"), meta.get("revision")
    remedy = pull_again(f"{name}@{revision}") if name and revision else FETCH_AGAIN
    try:
        config = ModelConfig.from_dict(meta["model"])
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise CorruptFile(f"{path / 'config.json'} does not describe a model ({error}); {remedy}") from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from error
    readers: list[TensorReader] = []
    if meta.get("base"):
        readers.append(_open_base(path, meta["base"], remedy))
    names = [*meta.get("weights", []), *meta.get("delta", [])]
    if meta.get("gate"):
        names.append("gate.safetensors")
    readers.append(SafetensorsFiles((path / str(name) for name in names), remedy))
    return ModelSource(config, meta, readers, path, path, remedy)


def _open_base(path: Path, base: dict[str, Any], remedy: str) -> TensorReader:
    kind, file = base.get("kind"), path / str(base.get("file"))
    if kind not in ("gguf", "safetensors"):
        raise UnsupportedModel(f"{path}: base of kind {kind!r} is unknown, want gguf or safetensors; update Morph")
    if not file.exists():
        raise CorruptFile(f"{path}: the base {base.get('file')} is missing; {remedy}")
    return GGUFFile(file, remedy) if kind == "gguf" else open_hf_folder(file, remedy)[1]


def _checked_rope(source: ModelSource, path: Path) -> ModelSource:
    """Refuse a RoPE scaling that the model code does not know, before any weight is read."""
    try:
        inverse_frequencies(source.config)
    except KeyError as error:
        raise CorruptFile(f"{path}: rope_scaling {source.config.rope_scaling} has no {error}; restore it") from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from error
    return source
