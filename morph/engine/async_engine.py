"""The engine in a thread of its own, for servers and interactive use.

The loop thread alone touches the engine. Callers hand over commands through a queue and get outputs through
asyncio queues of their own loop, so a slow reader never holds up a step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from morph.config import EngineConfig, ModelConfig
from morph.engine.engine import Engine
from morph.engine.load import LoadedModel, load_engine
from morph.engine.params import RequestOutput, SamplingParams
from morph.engine.request import Request
from morph.errors import EngineDead

log = logging.getLogger(__name__)

Sink = tuple[asyncio.AbstractEventLoop, "asyncio.Queue[RequestOutput | EngineDead]"]


class AsyncEngine:
    """Concurrent requests against one model.

    Args:
        loaded: from `morph.engine.load.load_engine`.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.tokenizer = loaded.tokenizer
        self.model_name = loaded.name
        self.config: ModelConfig = loaded.engine.config
        self.engine_config: EngineConfig = loaded.engine_config
        self.source = loaded.source
        self._engine: Engine = loaded.engine
        self._commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._stats: dict[str, Any] = loaded.engine.stats()
        self.error: BaseException | None = None

    @classmethod
    def from_model(cls, path: str | Path, engine_config: EngineConfig, device: str = "cpu") -> AsyncEngine:
        """Load a model; not started yet."""
        return cls(load_engine(path, engine_config, device))

    @property
    def has_gates(self) -> bool:
        """True when `layout="auto"` is served by gates (or there is nothing to decide)."""
        return not self.config.is_adaptive or bool(self.source.meta.get("gate"))

    @property
    def alive(self) -> bool:
        """False before `start` and once the loop has stopped."""
        return self._thread is not None and self._thread.is_alive() and self.error is None

    def start(self) -> None:
        """Start the loop thread."""
        if self._thread is not None:
            return
        # Steps are short; the default of 5 ms would let a busy reader delay each of them by as much.
        sys.setswitchinterval(0.001)
        self._thread = threading.Thread(target=self._run, name="morph-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the loop after the current step; requests in flight end with an error."""
        if self._thread is None:
            return
        self._stopping = True
        self._commands.put(("wake", None))
        self._thread.join()

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come; the last one is `finished`.

        Leaving the iteration early aborts the request.

        Raises:
            InvalidRequest: before the first output.
            EngineDead: the loop stopped.
        """
        request_id = request_id or f"req-{secrets.token_hex(8)}"
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        request = self._engine.make_request(request_id, tokens, params, priority)
        if not self.alive:
            raise EngineDead(f"the engine is not running: {self.error or 'not started'}")
        inbox: asyncio.Queue[RequestOutput | EngineDead] = asyncio.Queue()
        self._commands.put(("add", (request, (asyncio.get_running_loop(), inbox))))
        done = False
        try:
            while not done:
                item = await inbox.get()
                if isinstance(item, EngineDead):
                    done = True
                    raise item
                done = item.finished
                yield item
        finally:
            if not done:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """Stop a request within one step; nothing happens when it has ended."""
        self._commands.put(("abort", request_id))

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as of the last step."""
        return dict(self._stats, queued=self._commands.qsize())

    # ---- loop thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands(block=self._engine.idle)
                if not self._engine.idle:
                    self._hand_out(self._engine.step())
                self._stats = self._engine.stats()
                if self._engine.idle:
                    self._engine.check()
            self._fail_all(EngineDead("the engine was stopped"))
        except BaseException as error:
            log.exception("engine loop stopped")
            self.error = error
            self._fail_all(EngineDead(f"the engine loop stopped: {type(error).__name__}: {error}"))

    def _take_commands(self, block: bool) -> None:
        while True:
            try:
                command, value = self._commands.get(block=block)
            except queue.Empty:
                return
            block = False
            if command == "add":
                request, sink = value
                self._sinks[request.id] = sink
                self._engine.add(request)
            elif command == "abort":
                request = self._engine.abort(value)
                if request is not None:
                    self._hand_out([request])

    def _hand_out(self, requests: list[Request]) -> None:
        for request in requests:
            sink = self._sinks.get(request.id)
            if sink is None:
                continue
            if request.finished:
                del self._sinks[request.id]
            loop, inbox = sink
            self._post(loop, inbox, request.output(self.config.num_blocks))

    @staticmethod
    def _post(
        loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[Any], item: RequestOutput | EngineDead
    ) -> None:
        try:
            loop.call_soon_threadsafe(inbox.put_nowait, item)
        except RuntimeError:
            log.debug("a reader's event loop is closed; its output is dropped")

    def _fail_all(self, error: EngineDead) -> None:
        self._stopping = True
        for loop, inbox in self._sinks.values():
            self._post(loop, inbox, error)
        self._sinks.clear()
        while not self._commands.empty():
            command, value = self._commands.get()
            if command == "add":
                loop, inbox = value[1]
                self._post(loop, inbox, error)
