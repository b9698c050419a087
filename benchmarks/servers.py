"""Starting and stopping the servers that a benchmark compares."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ServerSpec:
    """How to start one server.

    Attributes:
        command: with `{port}` where the port goes.
        environment: variables on top of this process's own.
        ready_timeout_s: how long loading and compiling may take.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 600


@dataclass(frozen=True)
class Server:
    """A server that answers: its address and the root of its process tree."""

    url: str
    pid: int


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _stop(process: subprocess.Popen[bytes], timeout_s: float = 30) -> None:
    """Ask the process group to end, and end it where asking does not help."""
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(timeout_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def running(spec: ServerSpec, name: str) -> Iterator[Server]:
    """Start a server, wait for `/health`, and stop it with all its children afterwards.

    Raises:
        RuntimeError: it ended or did not get healthy in time; the message ends with its log.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = Path(tempfile.gettempdir()) / f"benchmark-{name}-{port}.log"
    command = [part.replace("{port}", str(port)) for part in spec.command]
    with log.open("wb") as output:
        # A session of its own, so that workers which the server forks can be stopped with it.
        process = subprocess.Popen(
            command,
            env={**os.environ, **spec.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + spec.ready_timeout_s
        while not _healthy(url):
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode} ({log}):\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} not healthy after {spec.ready_timeout_s:.0f} s ({log}):\n{_tail(log)}")
            time.sleep(0.25)
        yield Server(url, process.pid)
    finally:
        _stop(process)


def morph_server(python: str, model: str, dtype: str, more: Sequence[str] = ()) -> ServerSpec:
    """Morph's own server, with further options of `morph serve` if given."""
    command = [python, "-m", "morph", "serve", "--model", model, "--dtype", dtype]
    return ServerSpec([*command, "--port", "{port}", *more])


def vllm_server(venv: Path, model: Path, dtype: str, cores: Sequence[int], tcmalloc: Path | None) -> ServerSpec:
    """vLLM's CPU build with the settings that its documentation recommends.

    Inductor compilation is its default. All cores go to OpenMP threads, bound one to one (its own choice
    would keep one core for the front end), Intel's OpenMP and tcmalloc are preloaded, and the KV cache has
    room for the largest row without preemption.

    Args:
        venv: environment made by `peers/setup_vllm_cpu.sh`.
        model: Hugging Face folder.
        cores: numbers of the cores to use.
        tcmalloc: libtcmalloc_minimal.so.4, or None to use the C library's allocator.
    """
    preload = [path for path in (tcmalloc, venv / "lib" / "libiomp5.so") if path and path.exists()]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "LD_PRELOAD": ":".join(str(path.resolve()) for path in preload),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [str(venv / "bin" / "vllm"), "serve", str(model), "--dtype", dtype]
    command += ["--max-model-len", "4608", "--host", "127.0.0.1", "--port", "{port}"]
    return ServerSpec(command, environment)
