"""Finished items on disk, one JSON line each, so that a stopped run goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from morph.errors import CorruptFile, InvalidRequest, MorphError

SETTINGS = "settings.json"
Record = dict[str, Any]


class Store:
    """The folder of one evaluation.

    Args:
        settings: what results depend on, plain JSON types. A folder made under others is refused: its items could not
            be compared with new ones.

    Raises:
        InvalidRequest: the folder belongs to another evaluation, holds other things, or cannot be written.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.dropped = 0
        settings = json.loads(json.dumps(settings))
        known = folder / SETTINGS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if known.exists():
                self._compare(json.loads(known.read_text(encoding="utf-8")), settings)
            elif any(folder.iterdir()):
                raise InvalidRequest(f"--out {folder} holds other files; name an empty or a new folder", "out")
            else:
                write_json(known, settings)
        except OSError as error:
            raise InvalidRequest(
                f"--out {folder} cannot be used ({error.strerror}); name a folder that can be written", "out"
            ) from error
        except json.JSONDecodeError as error:
            raise CorruptFile(f"{known} is not readable ({error}); delete the folder and begin again") from error

    def _compare(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                raise InvalidRequest(
                    f"--out {self.folder} was made with {key} {old.get(key)!r}, this run has {new.get(key)!r}; repeat "
                    "the first run's options or name another folder",
                    "out",
                )

    def path(self, dataset: str, slug: str) -> Path:
        """File of one set under one layout."""
        return self.folder / "items" / dataset / f"{slug}.jsonl"

    def read(self, dataset: str, slug: str) -> dict[str, Record]:
        """Finished items by id. A last line that a crash cut short is dropped, and counted in `dropped`.

        Raises:
            CorruptFile: another line is damaged.
        """
        path = self.path(dataset, slug)
        if not path.exists():
            return {}
        content = path.read_bytes()
        lines = content.split(b"\n")
        found: dict[str, Record] = {}
        good = 0
        for number, line in enumerate(lines, 1):
            last = number == len(lines)
            if not line:
                good += not last
                continue
            try:
                record = json.loads(line)
                found[record["id"]] = record
            except (ValueError, KeyError, TypeError) as error:
                if not last:
                    raise CorruptFile(
                        f"{path}:{number} is damaged ({error}); delete the line, its item will be run again"
                    ) from error
                self.dropped += 1
                break
            good += len(line) + 1
        if good < len(content):
            with open(path, "r+b") as file:
                file.truncate(good)
        elif good > len(content):  # the newline of the last line is missing, the record is whole
            with open(path, "ab") as file:
                file.write(b"\n")
        return found

    def append(self, dataset: str, slug: str, records: Iterable[Record]) -> None:
        """Add finished items; they are on disk when this returns.

        Raises:
            MorphError: they could not be written; what was there before is kept.
        """
        path = self.path(dataset, slug)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                for record in records:
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise MorphError(
                f"{path} could not be written ({error.strerror}); items finished before are kept: make room and run "
                "the same command again"
            ) from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    part = path.with_name(f".part-{path.name}")
    part.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, path)
