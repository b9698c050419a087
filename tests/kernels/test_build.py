"""How a backend is chosen, and what happens where no compiler works."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import morph.kernels
from morph.kernels import build, get_kernels
from tests.kernels.memory import native_kernels


@pytest.fixture(autouse=True)
def forget_library() -> None:
    morph.kernels._library.cache_clear()


def test_without_a_compiler_one_warning_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MORPH_KERNELS", raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        names = [get_kernels("cpu", torch.float32, 2).name for _ in range(3)]
    assert names == ["torch"] * 3
    assert len(caplog.records) == 1
    assert "no-such-compiler" in caplog.text and "install g++" in caplog.text


def test_forced_native_without_a_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORPH_KERNELS", "native")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.KernelBuildError, match="no-such-compiler"):
        get_kernels("cpu", torch.float32, 2)


def test_forced_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORPH_KERNELS", "torch")
    assert get_kernels("cpu", torch.float32, 2).name == "torch"


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORPH_KERNELS", "cuda")
    with pytest.raises(ValueError, match="'cuda'; use torch, native or auto"):
        get_kernels("cpu", torch.float32, 2)


def test_a_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nif [ $1 = --version ]; then echo fake 1; else echo out of cheese >&2; exit 1; fi\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MORPH_HOME", str(tmp_path / "home"))
    with pytest.raises(build.KernelBuildError, match="out of cheese"):
        build.load_library()
    assert not list((tmp_path / "home" / "kernels").iterdir()), "a failed build left files behind"


def test_the_library_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    native_kernels(torch.float32, 1)

    def refuse(*_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(build, "_build", refuse)
    assert isinstance(build.load_library(), ctypes.CDLL)


def test_one_openmp_runtime_in_the_process() -> None:
    native_kernels(torch.float32, 1)
    if not sys.platform.startswith("linux") or build._is_clang(build.find_compiler()):
        pytest.skip("only gcc on Linux shares torch's runtime")
    code = (
        "import torch\nfrom morph.kernels.build import load_library\nload_library()\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "print(len({m for m in maps if 'libgomp' in m or 'libomp' in m or 'libiomp' in m}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
