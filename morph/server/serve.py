"""The server process: port, model, uvicorn, and an orderly end."""

from __future__ import annotations

import errno
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from morph.errors import MorphError
from morph.server.app import create_app
from morph.server.body import MAX_BODY_BYTES
from morph.server.interface import ServedEngine

log = logging.getLogger(__name__)


class ManagedEngine(ServedEngine, Protocol):
    """An engine that the process starts and stops."""

    def start(self) -> None:
        """Start the engine loop."""
        ...

    def stop(self) -> None:
        """Stop the engine loop and free what it holds."""
        ...


class CannotListen(MorphError):
    """The address is taken, unknown or not allowed."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 = any free one.

    Raises:
        CannotListen: names the address and the remedy.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise CannotListen(f"cannot resolve {host}:{port} ({error}); give another --host") from None
    sock = socket.socket(family, kind, proto)
    # Without it a restart would have to wait for the old connections' TIME_WAIT.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except (OSError, OverflowError) as error:
        sock.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise CannotListen(f"port {port} on {host} is in use; stop that process or give another --port") from None
        reason = getattr(error, "strerror", None) or str(error)
        raise CannotListen(f"cannot listen on {host}:{port} ({reason}); give another --host or --port") from None
    return sock


def serve(
    load: Callable[[], ManagedEngine],
    host: str = "127.0.0.1",
    port: int = 8000,
    model_name: str | None = None,
    drain_s: float = 60.0,
    max_body_bytes: int = MAX_BODY_BYTES,
    api_keys: tuple[str, ...] = (),
    on_ready: Callable[[str, str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; then take no new connections, finish what runs, and return.

    Args:
        load: makes the engine; called once the port is ours, so that a taken port fails before minutes of loading.
        api_keys: see `create_app`.
        drain_s: seconds that running requests may take to finish; then they are aborted.
        on_ready: called with the base URL and the model's name when connections are accepted.

    Raises:
        CannotListen: the port is taken.
        MorphError: the model cannot be loaded.
    """
    sock = bind(host, port)
    try:
        engine = load()
        engine.start()
        try:
            app = create_app(engine, model_name, max_body_bytes, api_keys)
            _run(engine, app, sock, host, model_name, drain_s, on_ready)
        finally:
            engine.stop()
    finally:
        sock.close()


def _run(
    engine: ManagedEngine,
    app: FastAPI,
    sock: socket.socket,
    host: str,
    model_name: str | None,
    drain_s: float,
    on_ready: Callable[[str, str], None] | None,
) -> None:
    config = uvicorn.Config(
        app,
        log_level="info",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        lifespan="off",
    )
    server = _Server(config, on_started=None, on_stopping=app.state.closing.set)
    if on_ready is not None:
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{sock.getsockname()[1]}"
        name = model_name or engine.model_name
        ready = on_ready
        server.on_started = lambda: ready(url, name)
    # uvicorn drains and then raises the signal again for whoever waits; the drain was all that we want of it.
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with suppress(KeyboardInterrupt):
            server.run(sockets=[sock])
    finally:
        signal.signal(signal.SIGTERM, previous)


class _Server(uvicorn.Server):
    """Tells when it accepts connections, and when it begins to drain."""

    def __init__(
        self, config: uvicorn.Config, on_started: Callable[[], None] | None, on_stopping: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.on_started = on_started
        self.on_stopping = on_stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.on_started is not None:
            self.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_stopping()
        await super().shutdown(sockets)
