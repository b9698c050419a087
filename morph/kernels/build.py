"""Compiles the C++ kernels with the system's compiler at first use and keeps the library in the cache.

The library has a plain C interface (no torch or Python headers), so any C++17 compiler with OpenMP will do, and it
survives upgrades of torch. It is linked against the OpenMP runtime that torch brings, so that both share one pool of
threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from morph.errors import MorphError

SOURCES = Path(__file__).parent / "native"
REMEDY = "install g++ (Debian: apt-get install g++), or set CXX to a C++17 compiler with OpenMP"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
)


class KernelBuildError(MorphError):
    """The native kernels cannot be compiled here; the message carries the compiler's words and the remedy."""


def load_library() -> ctypes.CDLL:
    """The compiled kernels, from the cache or freshly built.

    Raises:
        KernelBuildError: no compiler, or it failed.
    """
    compiler = find_compiler()
    flags = [*FLAGS, *_machine_flags(), *_openmp_compile_flags(compiler)]
    library = _cache_folder() / f"{_key(compiler, flags)}.so"
    if not library.exists():
        _build(compiler, flags, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelBuildError(f"{library} does not load: {error}; delete it and try again") from error


def find_compiler() -> str:
    """Path of `$CXX`, g++, clang++ or c++, the first that exists.

    Raises:
        KernelBuildError: none does.
    """
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++", "c++"]:
        path = shutil.which(name)
        if path:
            return path
    raise KernelBuildError(f"no C++ compiler ({wanted or 'g++, clang++ or c++'}) on the PATH; {REMEDY}")


def _cache_folder() -> Path:
    from morph.hub.paths import cache_home

    return cache_home() / "kernels"


def _key(compiler: str, flags: list[str]) -> str:
    """Everything that the machine code depends on."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for part in (_version(compiler), *flags, *_openmp_link_flags(compiler), platform.machine(), _cpu()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """Model and features of the processor: -march=native code of one must not run on another."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = info.read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(wanted))


def cpu_has(feature: str) -> bool:
    """True when /proc/cpuinfo lists the feature, e.g. `amx_bf16`."""
    return feature in _cpu().split()


def _machine_flags() -> list[str]:
    if platform.machine() in ("x86_64", "AMD64"):
        return ["-march=native", "-mprefer-vector-width=512"]
    return ["-mcpu=native"]


def _bundled_openmp() -> Path | None:
    """The OpenMP library inside torch's package."""
    folder = Path(torch.__file__).parent / "lib"
    found = sorted(folder.glob("libomp*.dylib" if sys.platform == "darwin" else "libgomp*.so*"))
    return found[0] if found else None


@functools.cache
def _version(compiler: str) -> str:
    """What the compiler says of itself."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _is_clang(compiler: str) -> bool:
    return "clang" in _version(compiler)


def _openmp_compile_flags(compiler: str) -> list[str]:
    return ["-Xclang", "-fopenmp"] if sys.platform == "darwin" and _is_clang(compiler) else ["-fopenmp"]


def _openmp_link_flags(compiler: str) -> list[str]:
    bundled = _bundled_openmp()
    # Clang on Linux calls LLVM's runtime, which torch does not have there.
    if bundled is not None and (sys.platform == "darwin" or not _is_clang(compiler)):
        return [str(bundled)]
    return ["-fopenmp"]


def _build(compiler: str, flags: list[str], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and renamed: of processes that build at once, each leaves a whole library.
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        built = Path(folder) / library.name
        _run([compiler, "-shared", *map(str, objects), "-o", str(built), *_openmp_link_flags(compiler)])
        os.replace(built, library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelBuildError(
            f"compiling the native kernels failed: {' '.join(command)}\n{done.stderr[-2000:]}\n{REMEDY}"
        )
