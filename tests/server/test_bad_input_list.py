"""Bad input against a real engine behind a socket: clear errors, and afterwards not one page or slot is missing."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from morph.config import EngineConfig
from morph.engine.async_engine import AsyncEngine
from morph.server.app import create_app

PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass
class RealServer:
    """uvicorn over an engine that runs a tiny model."""

    url: str
    engine: AsyncEngine

    def wait_until_empty(self) -> None:
        """Raise unless all memory comes back within seconds."""
        deadline = time.monotonic() + 10
        while True:
            stats = self.engine.stats()
            busy = {name: stats[name] for name in ("running", "waiting", "prefilling", "units_reserved")}
            if not any(busy.values()) and stats["units_free"] + stats["units_cached"] == stats["units_total"]:
                assert stats["free_slots"] == self.engine.engine_config.max_requests
                return
            assert time.monotonic() < deadline, f"still held: {stats}"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def real(tiny_folder: Path) -> Iterator[RealServer]:
    engine = AsyncEngine.from_model(
        tiny_folder, EngineConfig(dtype="float32", max_requests=3, memory_bytes=8 << 20, poison=True)
    )
    engine.start()
    server = uvicorn.Server(uvicorn.Config(create_app(engine), port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield RealServer(f"http://127.0.0.1:{port}", engine)
    server.should_exit = True
    thread.join(10)
    engine.stop()


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A good request of either endpoint, with some fields changed."""
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": 3}
    ask |= {"prompt": "Hi"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "Hi"}]}
    return ask | fields


BAD: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "another"}, 404, "model"),
    ({"morph": {"layout": "101"}}, 400, "morph.layout"),
    ({"morph": {"layout": "10102"}}, 400, "morph.layout"),
    ({"morph": {"layout": "10x1"}}, 400, "morph.layout"),
    ({"morph": {"layout": "mamba"}}, 400, "morph.layout"),
    ({"morph": {"attention_budget": -0.1}}, 400, "morph.attention_budget"),
    ({"morph": {"attention_budget": 1.5}}, 400, "morph.attention_budget"),
    ({"morph": {"layuot": "auto"}}, 400, "morph.layuot"),
    ({"morph": []}, 400, "morph"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 10**9}, 400, "max_tokens"),
    ({"max_tokens": 10**30}, 400, "max_tokens"),
    ({"unknown": 1}, 400, "unknown"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_each_bad_field_is_named_and_nothing_is_held(real: RealServer, path: str, stream: bool) -> None:
    with httpx.Client(base_url=real.url, timeout=30) as client:
        for fields, status, param in BAD:
            response = client.post(path, json=body(path, stream=stream, **fields))
            assert response.status_code == status, (fields, response.text)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["param"] == param, fields
            assert error["type"] == "invalid_request_error" and len(error["message"]) > 10
        real.wait_until_empty()
        assert client.post(path, json=body(path)).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATHS[0], {"prompt": ""}, "prompt"),
        (PATHS[0], {"prompt": []}, "prompt"),
        (PATHS[0], {"prompt": [[]]}, "prompt"),
        (PATHS[0], {"prompt": ["good", ""]}, "prompt"),
        (PATHS[0], {"prompt": "x" * 600}, "prompt"),
        (PATHS[0], {"prompt": [5, 300]}, "prompt"),
        (PATHS[1], {"messages": []}, "messages"),
        (PATHS[1], {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ],
)
def test_prompts_that_are_empty_too_long_or_no_tokens(
    real: RealServer, path: str, fields: dict[str, Any], param: str
) -> None:
    response = httpx.post(real.url + path, json=body(path, **fields), timeout=30)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
    real.wait_until_empty()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("data", [b'{"model": ', b"[]", b"", b'{"model": "tiny", "prompt": "\xff"}'])
def test_bodies_that_are_no_json(real: RealServer, path: str, data: bytes) -> None:
    response = httpx.post(real.url + path, content=data, headers={"content-type": "application/json"}, timeout=30)
    assert response.status_code == 400 and response.json()["error"]["code"] in ("invalid_json", "invalid_utf8")
    real.wait_until_empty()


def leave(url: str, path: str, stream: bool, after_bytes: int) -> None:
    """Ask for a long answer and close the connection after some bytes of it."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body(path, max_tokens=400, stream=stream, ignore_eos=True)).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(head.encode() + data)
        got = 0
        while got < after_bytes:
            piece = sock.recv(256)
            assert piece, "the server ended the stream"
            got += len(piece)


@pytest.mark.parametrize("path", PATHS)
def test_clients_that_go_away_leave_nothing_behind(real: RealServer, path: str) -> None:
    before = real.engine.stats()["aborted"]
    # More than there are slots: some leave while they run, some while they wait.
    threads = [threading.Thread(target=leave, args=(real.url, path, True, 600 * (i % 2))) for i in range(6)]
    threads += [threading.Thread(target=leave, args=(real.url, path, False, 0)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    real.wait_until_empty()
    assert real.engine.stats()["aborted"] > before, "every answer was finished before its client left"
    assert httpx.get(real.url + "/health").json()["status"] == "ok"
    assert httpx.post(real.url + path, json=body(path), timeout=30).status_code == 200
