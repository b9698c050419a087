"""The work folder of a fit: what each stage made, so that a stopped run goes on where it was."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from morph.errors import CorruptFile, InvalidRequest, MorphError

SETTINGS = "settings.json"
LIGHT = "light"
"""Sub-folder with what is worth keeping when the rest is thrown away: a few files below 16 MiB each."""


class OutOfTime(MorphError):
    """The time limit came before the end; what was measured is in the work folder."""


class Deadline:
    """The time that a run may take.

    Args:
        seconds: from now on; None = no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._began, self.limit = time.monotonic(), seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until the limit; infinite without one."""
        return float("inf") if self.limit is None else self.limit - self.elapsed

    def check(self, stage: str) -> None:
        """Raise `OutOfTime` when the limit has passed."""
        if self.left <= 0:
            raise OutOfTime(
                f"stopped at the limit of {self.limit:g} s in stage {stage!r}; what was measured is kept: run the "
                "same command with the same --work again to go on"
            )


class WorkFolder:
    """Results by name, each written whole or not at all.

    Args:
        settings: what the results depend on, plain JSON types; a folder made under others is refused.

    Raises:
        InvalidRequest: the folder is of another model or other settings, holds other things, or cannot be written.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        settings = json.loads(json.dumps(settings))
        try:
            path.mkdir(parents=True, exist_ok=True)
            known = path / SETTINGS
            if known.exists():
                self._compare(json.loads(known.read_text(encoding="utf-8")), settings)
            elif any(path.iterdir()):
                raise InvalidRequest(f"--work {path} holds other files; name an empty or a new folder")
            else:
                self.write_json(SETTINGS, settings)
            (path / LIGHT).mkdir(exist_ok=True)
        except OSError as error:
            raise InvalidRequest(
                f"--work {path} cannot be used ({error.strerror}); name a folder that can be written"
            ) from error
        except ValueError as error:
            if isinstance(error, InvalidRequest):
                raise
            raise CorruptFile(
                f"{path / SETTINGS} is not readable ({error}); delete the folder and begin again"
            ) from error

    def _compare(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        different = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        if different:
            key = different[0]
            more = f" (and {', '.join(different[1:])})" if different[1:] else ""
            raise InvalidRequest(
                f"--work {self.path} was made with {key} {_short(old.get(key))}, this run has "
                f"{_short(new.get(key))}{more}; repeat the first run's options or name another folder"
            )

    def has(self, name: str) -> bool:
        """Whether there is a result of that name."""
        return (self.path / name).exists()

    def _write(self, name: str, writer: Callable[[Path], Any]) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        # The same ending: numpy adds its own to others.
        part = target.with_name(f".part-{target.name}")
        writer(part)
        os.replace(part, target)

    def write_json(self, name: str, value: Any) -> None:
        """Keep plain JSON types."""
        self._write(name, lambda path: path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8"))

    def read_json(self, name: str) -> Any:
        """What `write_json` kept."""
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    def write_arrays(self, name: str, arrays: dict[str, Any]) -> None:
        """Keep numpy arrays, compressed."""
        self._write(name, lambda path: np.savez_compressed(path, **arrays))

    def read_arrays(self, name: str) -> dict[str, Any]:
        """What `write_arrays` kept."""
        with np.load(self.path / name) as file:
            return {key: file[key] for key in file.files}

    def write_tensors(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Keep tensors."""
        self._write(name, lambda path: save_file({k: v.contiguous() for k, v in tensors.items()}, path))

    def read_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """What `write_tensors` kept."""
        found: dict[str, torch.Tensor] = load_file(self.path / name)
        return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "…"
