"""The systems that a serving benchmark compares, behind one interface: run these prompts, time them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.client import Endpoint, Timing, first_model, run_requests
from benchmarks.report import shorten_paths
from benchmarks.servers import ServerSpec, running

Prompts = Sequence[list[int]]

MORPH_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "morph-attention": {"layout": "attention"},
    "morph-auto": {"layout": "auto", "attention_budget": 0.5},
    "morph-ssm": {"layout": "ssm"},
}
"""Target name -> the `morph` object of its requests."""


@dataclass(frozen=True)
class Session:
    """A target that is up.

    Attributes:
        run: prompts, tokens per answer and concurrency -> one timing per prompt.
        pid: root of its process tree, or None when it was started elsewhere.
    """

    run: Callable[[Prompts, int, int], list[Timing]]
    pid: int | None


@dataclass(frozen=True)
class Target:
    """One system under test.

    Attributes:
        name: as shown in the results.
        open: starts it and stops it again.
        settings: what the results say about how it was run.
    """

    name: str
    open: Callable[[], AbstractContextManager[Session]]
    settings: Mapping[str, Any]


def _extra(name: str) -> dict[str, Any]:
    return {"morph": MORPH_OPTIONS[name]} if name in MORPH_OPTIONS else {}


def _http_session(name: str, url: str, pid: int | None) -> Session:
    key = os.environ.get("OPENAI_API_KEY")
    endpoint = Endpoint(url, asyncio.run(first_model(url, key)), _extra(name), key)

    def run(prompts: Prompts, max_tokens: int, concurrency: int) -> list[Timing]:
        return asyncio.run(run_requests(endpoint, prompts, max_tokens, concurrency))

    return Session(run, pid)


def running_server(name: str, url: str) -> Target:
    """A server that somebody else started. The names in `MORPH_OPTIONS` send Morph's options along."""

    @contextmanager
    def start() -> Iterator[Session]:
        yield _http_session(name, url, None)

    return Target(name, start, {"url": url, "request": _extra(name)})


def own_server(name: str, spec: ServerSpec) -> Target:
    """A server that the benchmark starts for its turn."""

    @contextmanager
    def start() -> Iterator[Session]:
        with running(spec, name) as server:
            yield _http_session(name, server.url, server.pid)

    settings = {
        "command": [shorten_paths(part) for part in spec.command],
        "environment": {key: shorten_paths(value) for key, value in spec.environment.items()},
        "request": _extra(name),
    }
    return Target(name, start, settings)


def transformers_generate(name: str, model: Path, dtype: str) -> Target:
    """Static batches of transformers' generate, in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.peers.transformers_generate"]
    command += ["--model", str(model), "--dtype", dtype]

    @contextmanager
    def start() -> Iterator[Session]:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            jobs, answers = process.stdin, process.stdout

            def answer() -> Any:
                line = answers.readline()
                if not line:
                    raise RuntimeError(f"{name} ended with {process.wait()}; its error is above")
                return json.loads(line)

            def run(prompts: Prompts, max_tokens: int, concurrency: int) -> list[Timing]:
                job = {"prompts": list(prompts), "max_tokens": max_tokens, "batch": concurrency}
                print(json.dumps(job), file=jobs, flush=True)
                return [Timing(**timing) for timing in answer()]

            answer()
            try:
                yield Session(run, process.pid)
            finally:
                process.kill()

    return Target(name, start, {"command": [shorten_paths(part) for part in command], "request": {}})
