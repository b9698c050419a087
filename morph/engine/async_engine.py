"""The engine in a thread of its own, for servers and interactive use.

The loop thread alone touches the engine. Callers hand over commands through a queue and get outputs in their own event
loop: all that a step has to say to one loop travels together, because waking a loop costs both threads more than the
news itself. The loop thread never waits for a reader.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from morph.config import EngineConfig, ModelConfig
from morph.engine.engine import Engine
from morph.engine.load import LoadedModel, load_engine
from morph.engine.params import RequestOutput, SamplingParams
from morph.engine.request import Request
from morph.errors import EngineDead

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 2e-4
"""How long the event loop may keep the GIL when the engine thread wants it back after a kernel.

A decode step makes hundreds of calls into kernels, each of which lets the GIL go; the interpreter's default of 5 ms
would let a busy event loop delay any of them by that much.
"""

Item = RequestOutput | Exception
Deliver = Callable[[Item], None]


class Mailbox:
    """From the engine thread to one event loop; the loop is woken once for all that waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Deliver, Item]] = deque()
        self._called = False

    def post(self, news: Iterable[tuple[Deliver, Item]]) -> None:
        """Hand over; called by the engine thread only."""
        self._waiting.extend(news)
        # `_empty` lowers the flag before it looks, so news that find it raised are seen by the coming look.
        if self._called:
            return
        self._called = True
        try:
            self.loop.call_soon_threadsafe(self._empty)
        except RuntimeError:
            self._waiting.clear()
            log.debug("a reader's event loop is closed; its outputs are dropped")

    def _empty(self) -> None:
        self._called = False
        while self._waiting:
            deliver, item = self._waiting.popleft()
            try:
                deliver(item)
            except Exception:
                # One reader's fault must not keep the others' outputs back.
                log.exception("a reader of outputs failed")


@dataclass
class Sink:
    """Who reads a request's outputs, and whether each step's or only the finished one."""

    mailbox: Mailbox
    deliver: Deliver
    whole: bool


T = TypeVar("T")


def _in_passing_thread(work: Callable[[], T]) -> T:
    """Do the work in a thread of its own, which has ended when this returns.

    OpenMP keeps a team of workers for each thread that ever ran a parallel region. A team left behind by the thread
    that loads the weights makes more workers than cores; libgomp then lets all of them sleep instead of spin between
    regions, and a decode step, made of hundreds of regions of some 50 µs, takes half as long again.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    # A daemon, so that Ctrl-C ends the process without waiting for the rest of the work.
    thread = threading.Thread(target=run, name="morph-load", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


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
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.error: BaseException | None = None

    @classmethod
    def from_model(cls, path: str | Path, engine_config: EngineConfig, device: str = "cpu") -> AsyncEngine:
        """Load a model; not started yet."""
        return cls(_in_passing_thread(lambda: load_engine(path, engine_config, device)))

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
        sys.setswitchinterval(SWITCH_INTERVAL_S)
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
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        inbox: asyncio.Queue[Item] = asyncio.Queue()
        self.submit(tokens, params, request_id, inbox.put_nowait, priority)
        done = False
        try:
            while not done:
                item = await inbox.get()
                if isinstance(item, Exception):
                    done = True
                    raise item
                done = item.finished
                yield item
        finally:
            if not done:
                self.abort(request_id)

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        deliver: Deliver,
        priority: int = 0,
        whole: bool = False,
    ) -> None:
        """Queue a request; called in an event loop, which then calls `deliver` with each output as it comes.

        The last output is `finished`; an `EngineDead` instead of an output is the last item too. `deliver` must be
        quick: it runs between all other work of the loop.

        Args:
            whole: deliver the finished output only.

        Raises:
            InvalidRequest: the request cannot be served; `deliver` is never called.
            EngineDead: the loop stopped.
        """
        request = self._engine.make_request(request_id, list(prompt), params, priority)
        if not self.alive:
            raise EngineDead(f"the engine is not running: {self.error or 'not started'}")
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes[loop] = Mailbox(loop)
        self._commands.put(("add", (request, Sink(mailbox, deliver, whole))))

    def abort(self, request_id: str) -> None:
        """Stop a request within one step; nothing happens when it has ended."""
        self._commands.put(("abort", request_id))

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of now; read beside the running loop, so they may straddle two parts of one step."""
        return dict(self._engine.stats(), queued=self._commands.qsize())

    # ---- loop thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands(block=self._engine.idle)
                if not self._engine.idle:
                    self._hand_out(self._engine.step())
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
        news: dict[Mailbox, list[tuple[Deliver, Item]]] = {}
        for request in requests:
            sink = self._sinks.get(request.id)
            if sink is None or (sink.whole and not request.finished):
                continue
            if request.finished:
                del self._sinks[request.id]
            news.setdefault(sink.mailbox, []).append((sink.deliver, request.output(self.config.num_blocks)))
        for mailbox, items in news.items():
            mailbox.post(items)

    def _fail_all(self, error: EngineDead) -> None:
        self._stopping = True
        sinks = list(self._sinks.values())
        self._sinks.clear()
        while not self._commands.empty():
            command, value = self._commands.get()
            if command == "add":
                sinks.append(value[1])
        for sink in sinks:
            sink.mailbox.post([(sink.deliver, error)])
