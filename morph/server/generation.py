"""Running the sequences of one HTTP request: admission, merging, and abort when nobody listens any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from fastapi import Request

from morph.engine.params import RequestOutput, SamplingParams, TokenLogprob
from morph.server.errors import ApiError, ClientGone, bad_request, engine_dead, queue_full
from morph.server.interface import ServedEngine
from morph.server.metrics import Metrics
from morph.server.recorder import Recorder

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One sequence to generate: its token ids and parameters."""

    prompt: list[int]
    params: SamplingParams


@dataclass
class Update:
    """What is new of one sequence since the last update.

    Attributes:
        index: which job.
        output: its state so far; the `delta_*` fields cover the engine's last step only, use those here.
    """

    index: int
    output: RequestOutput
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, output: RequestOutput) -> None:
        """Join a later output to this update."""
        self.output = output
        self.text += output.delta_text
        self.token_ids += output.delta_token_ids
        self.logprobs += output.delta_logprobs or []


class Gate:
    """Counts the sequences inside the engine and refuses more than it is willing to queue."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self.in_flight = 0

    def check(self, count: int) -> None:
        """Raise unless `count` more sequences may wait.

        Raises:
            ApiError: 503 when the engine is dead, 429 when the queue is full, 400 when it could never hold them.
        """
        engine = self._engine
        if not engine.alive:
            raise engine_dead(engine.error)
        limit = engine.engine_config.max_waiting
        if count > limit:
            raise bad_request(
                f"the request asks for {count} sequences (prompts x n), the queue holds {limit}; split it",
                "n",
            )
        stats = engine.stats()
        # Counted here and not read from the engine: what was submitted a moment ago is not in its numbers yet.
        waiting = max(0, self.in_flight - int(stats["running"]) - int(stats.get("prefilling", 0)))
        if waiting + count > limit:
            raise queue_full(f"{waiting} requests are waiting, the queue holds {limit}; try again later")


class Generation:
    """The sequences of one HTTP request; an async context manager that leaves nothing running behind.

    Steps of one sequence that arrive while the client is not reading are joined, so that a client which reads
    slowly, or not at all, costs no more memory than its answer.

    Args:
        whole: the finished outputs are all that is wanted; `updates` gives nothing else.
    """

    def __init__(
        self,
        engine: ServedEngine,
        gate: Gate,
        metrics: Metrics,
        recorder: Recorder,
        request_id: str,
        jobs: Sequence[Job],
        whole: bool = False,
    ) -> None:
        self.jobs = list(jobs)
        self._whole = whole
        self._engine = engine
        self._gate = gate
        self._metrics = metrics
        self._recorder = recorder
        self._ids = [f"{request_id}-{index}" for index in range(len(jobs))]
        self._open: set[int] = set()
        self._unread = len(jobs)
        self._pending: dict[int, Update] = {}
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        """Submit all sequences and wait for the first news, so that a refusal comes before any answer begins."""
        self._gate.check(len(self.jobs))
        try:
            for index, job in enumerate(self.jobs):
                deliver = partial(self._receive, index)
                self._engine.submit(job.prompt, job.params, self._ids[index], deliver, whole=self._whole)
                self._open.add(index)
                self._gate.in_flight += 1
                self._recorder.begin(self._ids[index], len(job.prompt), job.params)
            await self._news()
            if self._failure is not None:
                raise self._failure
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort what has not finished; may be called again."""
        for index in list(self._open):
            self._engine.abort(self._ids[index])
            self._metrics.observe_abort()
            self._recorder.end(self._ids[index], "abort")
            self._leave(index)

    def _leave(self, index: int) -> None:
        self._open.discard(index)
        self._gate.in_flight -= 1

    def _receive(self, index: int, item: RequestOutput | Exception) -> None:
        """One item from the engine; called by the event loop."""
        if index not in self._open:
            return  # the end of a request that was aborted here
        self._recorder.update(self._ids[index], item)
        if isinstance(item, Exception):
            self._leave(index)
            self._failure = self._failure or item
        else:
            if item.finished:
                self._leave(index)
                self._metrics.observe(item)
                log.info("%s", _summary(item))
            update = self._pending.get(index)
            if update is None:
                update = self._pending[index] = Update(index, item)
            update.add(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _news(self) -> None:
        """Wait until there are outputs to hand on or there is a failure; for one caller at a time."""
        while not self._pending and self._failure is None:
            # A bare future: an Event costs as much as the rest of a token's way through here.
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def updates(self) -> list[Update]:
        """What is new of any sequence, at least one update; none once all sequences have finished.

        Raises:
            EngineDead: no more outputs will come; raised once those that came have been returned.
        """
        if not self._unread:
            return []
        await self._news()
        if not self._pending and self._failure is not None:
            raise self._failure
        updates = list(self._pending.values())
        self._pending.clear()
        for update in updates:
            self._unread -= update.output.finished
        return updates

    async def collect(self) -> list[RequestOutput]:
        """The finished output of each sequence.

        Raises:
            ApiError: see `failure_of`.
        """
        outputs: dict[int, RequestOutput] = {}
        while updates := await self.updates():
            for update in updates:
                if (failure := failure_of(update.output)) is not None:
                    raise failure
                outputs[update.index] = update.output
        return [outputs[index] for index in range(len(self.jobs))]


def _summary(output: RequestOutput) -> str:
    """One log line about a finished request, without any of its text."""
    blocks = len(output.layout or "")
    ttft = "-" if output.ttft is None else f"{output.ttft:.3f}"
    e2e = "-" if output.e2e is None else f"{output.e2e:.3f}"
    return (
        f"{output.request_id} {output.finish_reason}: {len(output.prompt_token_ids)} prompt "
        f"({output.cached_tokens} cached) + {len(output.token_ids)} answer tokens, "
        f"attention {output.attention_blocks}/{blocks} ({output.layout_source}), ttft {ttft} s, e2e {e2e} s"
    )


def failure_of(output: RequestOutput) -> ApiError | None:
    """500 when the engine gave up on a sequence, 503 when it shuts down, else None."""
    if output.finish_reason == "error":
        return ApiError(500, f"the engine could not finish the request: {output.error}", code="engine_error")
    if output.finish_reason == "abort":
        return ApiError(503, "the request was aborted, the server is shutting down; try again", code="aborted")
    return None


async def gone(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result, given up as soon as the client leaves.

    Raises:
        ClientGone: it left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
