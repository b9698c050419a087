"""The server process: SIGTERM lets requests finish, a taken port fails before the model loads."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from morph.server.serve import CannotListen, bind
from tests.server.fake import ANSWER

CHAT = {"model": "fake-1", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


class Process:
    """The server in a process of its own."""

    def __init__(self, delay: float, drain: float) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.server.process", "0", str(delay), str(drain)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == "loading\n"
        self.url = self.child.stdout.readline().strip()

    def end(self) -> tuple[int, str]:
        """Exit status and what was printed."""
        out, _ = self.child.communicate(timeout=20)
        return self.child.returncode, out


@pytest.fixture
def started() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.child.kill()
        process.child.wait()


def test_sigterm_lets_the_running_answer_finish(started: list[Process]) -> None:
    process = Process(delay=0.03, drain=20)
    started.append(process)
    with httpx.stream("POST", process.url + "/v1/chat/completions", json=CHAT) as response:
        lines = response.iter_lines()
        next(lines)
        process.child.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"stop"' in rest[-2]
    assert sum("content" in line for line in rest) >= len(ANSWER) - 2
    assert process.end() == (0, "stopped in order\n")


def test_sigterm_ends_an_answer_that_outlasts_the_drain(started: list[Process]) -> None:
    process = Process(delay=5, drain=1)
    started.append(process)
    threading.Timer(0.3, process.child.send_signal, [signal.SIGTERM]).start()
    with pytest.raises(httpx.HTTPError):
        httpx.post(process.url + "/v1/chat/completions", json=CHAT, timeout=15).raise_for_status()
    assert process.end() == (0, "stopped in order\n")


def test_an_open_dashboard_does_not_hold_up_the_end(started: list[Process]) -> None:
    process = Process(delay=0.01, drain=15)
    started.append(process)
    with httpx.stream("GET", process.url + "/morph/events", timeout=10) as response:
        lines = response.iter_lines()
        next(lines)
        begin = time.monotonic()
        process.child.send_signal(signal.SIGTERM)
        for _ in lines:  # the server ends the stream; a broken one would raise here
            pass
    assert process.end() == (0, "stopped in order\n")
    assert time.monotonic() - begin < 10, "the drain was waited for"


def test_a_taken_port_is_a_clear_error_before_the_model_loads() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"port {port} on 127.0.0.1 is in use; .* another --port"):
            bind("127.0.0.1", port)


def test_an_unknown_host_is_a_clear_error() -> None:
    with pytest.raises(CannotListen, match="--host"):
        bind("no.such.host.invalid", 8000)
