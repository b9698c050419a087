"""Tensors of one or several safetensors files, with int8 rows dequantised on the way."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from morph.checkpoint.remedy import FETCH_AGAIN
from morph.errors import CorruptFile


class SafetensorsFiles:
    """Tensors of several files as one; `X.q8` (int8 `[rows, …]`) with `X.scale` (`[rows]`) is read as `X`.

    Raises:
        CorruptFile: a file that is missing, truncated or no safetensors file; quantised rows without scales.
    """

    def __init__(self, paths: Iterable[Path], remedy: str = FETCH_AGAIN) -> None:
        self._files: dict[str, Any] = {}
        for path in paths:
            if not path.is_file():
                raise CorruptFile(f"{path} is missing; {remedy}")
            try:
                file = safe_open(path, framework="pt")
                names = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise CorruptFile(f"{path} is not a whole safetensors file ({error}); {remedy}") from error
            for name in names:
                if name.endswith(".q8") and f"{name.removesuffix('.q8')}.scale" not in names:
                    raise CorruptFile(f"{path}: tensor {name} has no scales beside it; {remedy}")
                self._files[name] = file

    def names(self) -> list[str]:
        """Names of all tensors, as they are read."""
        scales = {f"{name.removesuffix('.q8')}.scale" for name in self._files if name.endswith(".q8")}
        return [name.removesuffix(".q8") for name in self._files if name not in scales]

    def has(self, name: str) -> bool:
        """True when `get(name)` finds a tensor."""
        return name in self._files or f"{name}.q8" in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        stored = name if name in self._files else f"{name}.q8"
        return tuple(self._files[stored].get_slice(stored).get_shape())

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One tensor; int8 rows times their scale. Without conversion it may be a view of the mapped file."""
        if name in self._files:
            tensor: torch.Tensor = self._files[name].get_tensor(name)
            return tensor.to(dtype)
        stored = f"{name}.q8"
        quantised = self._files[stored].get_tensor(stored).float()
        scale = self._files[stored].get_tensor(f"{name}.scale").float()
        return (quantised * scale.view(-1, *([1] * (quantised.dim() - 1)))).to(dtype)
