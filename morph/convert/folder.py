"""Folders that appear whole or not at all, and what to say when the disk is full."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from morph.errors import InvalidRequest, MorphError


@contextmanager
def explain_full_disk(place: Path, needed: int) -> Iterator[None]:
    """Turn the errors of a full disk into one that says what is needed.

    Args:
        needed: bytes, about.

    Raises:
        MorphError: the disk is full.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors wraps the system's error into its own text.
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error).lower()
        if not full and "no space left" not in str(error).lower():
            raise
        raise MorphError(
            f"the disk of {place} is full: about {needed / 1e6:.0f} MB are needed; free some space or choose another "
            "folder (what was half written is gone)"
        ) from error


@contextmanager
def new_folder(target: Path, needed: int, replace: bool = False) -> Iterator[Path]:
    """A folder to fill beside `target`, which takes its name at the end; nothing is left on an error.

    Args:
        needed: bytes that will be written, about.
        replace: an existing folder is replaced, else refused.

    Raises:
        InvalidRequest: `target` exists. MorphError: the disk is full.
    """
    if target.exists() and not replace:
        raise InvalidRequest(f"{target} exists already; choose another --out or remove it", "out")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise MorphError(
            f"the disk of {target} has {free / 1e6:.0f} MB free, about {needed / 1e6:.0f} MB are needed; free some "
            "space or choose another folder"
        )
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with explain_full_disk(target.parent, needed):
            yield building
            # mkdtemp and safetensors make private files; a model folder has the usual rights.
            building.chmod(0o755)
            for file in building.glob("*.safetensors"):
                file.chmod(0o644)
            if target.exists():
                old = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
                target.rename(old / "old")
                building.rename(target)
                shutil.rmtree(old, ignore_errors=True)
            else:
                building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """The same file in another place: a hard link where the file system can, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
