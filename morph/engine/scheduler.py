"""Who runs next. The scheduler never touches a tensor.

One iteration = one decode step of all running requests + one group of blocks of one cohort of prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from morph.engine.admission import Admission
from morph.engine.request import Request, Status

if TYPE_CHECKING:
    from morph.engine.runner import Cohort

MAX_COHORTS = 4
PATIENCE = 8
"""Iterations that a long cohort waits behind shorter ones before it takes its turn."""


@dataclass
class Counters:
    """What happened since the start."""

    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0


class Scheduler:
    """Waiting, prefilling and running requests.

    Args:
        cohort_tokens: most prompt tokens that are prefilled together (one longer prompt may exceed it alone).
        drop_rows: takes a request's rows out of the cohort that it is in (the runner's part of leaving early).
    """

    def __init__(self, admission: Admission, cohort_tokens: int, drop_rows: Callable[[Cohort, Request], None]) -> None:
        self.admission = admission
        self.drop_rows = drop_rows
        self.cohort_tokens = cohort_tokens
        self.waiting: list[Request] = []
        self.cohorts: list[Cohort] = []
        self.running: list[Request] = []
        self.counters = Counters()

    @property
    def idle(self) -> bool:
        """True when there is nothing to do."""
        return not (self.waiting or self.cohorts or self.running)

    def add(self, request: Request) -> None:
        """Queue a request, by priority (lower first), then arrival."""
        request.status = Status.WAITING
        key = (request.priority, request.order)
        at = len(self.waiting)
        while at and (self.waiting[at - 1].priority, self.waiting[at - 1].order) > key:
            at -= 1
        self.waiting.insert(at, request)

    def next_members(self) -> list[Request]:
        """Admit waiting requests for a new cohort, in order; empty when none fits now.

        The order is strict but for requests that wait for what another one computes right now: a request that does
        not fit is not overtaken, so none starves.
        """
        if len(self.cohorts) >= MAX_COHORTS:
            return []
        members: list[Request] = []
        tokens = at = 0
        headroom = self.admission.page_of_all(self.running)
        while at < len(self.waiting):
            request = self.waiting[at]
            if request.leader is not None:
                if request.leader.status is Status.PREFILL:
                    at += 1
                    continue
                request.leader = None
            self.admission.look_up(request)
            if members and tokens + request.rows > self.cohort_tokens:
                self.admission.release(request)
                break
            admitted = self.admission.admit(request, headroom)
            if not admitted and request.hit is not None and not (members or self.running or self.cohorts):
                # Nobody else will give memory back, and what the hit holds on to may be what is missing.
                self.admission.release(request)
                admitted = self.admission.admit(request, headroom)
            if not admitted:
                self.admission.release(request)
                break
            self.waiting.pop(at)
            request.status = Status.PREFILL
            self.admission.plan_checkpoints(request, self.waiting[at:])
            members.append(request)
            tokens += request.rows
        return members

    def start_again(self, request: Request) -> None:
        """A request in prefill goes back to the queue with the decisions that it has."""
        self.admission.strayed(request)
        self._detach(request)
        self.add(request)

    def next_cohort(self, num_blocks: int) -> Cohort | None:
        """The cohort whose blocks run in this iteration: least work left first, but none waits for long."""
        if not self.cohorts:
            return None
        patient = [cohort for cohort in self.cohorts if cohort.waited >= PATIENCE]
        pick = patient[0] if patient else min(self.cohorts, key=lambda c: c.rows * (num_blocks - c.block))
        for cohort in self.cohorts:
            cohort.waited = 0 if cohort is pick else cohort.waited + 1
        return pick

    def make_room(self) -> list[Request]:
        """Give every running request room for one more token; returns those that had to yield theirs.

        The youngest yields first. A request that yields keeps its layout and its tokens and goes back to the queue.
        """
        yielded: list[Request] = []
        for request in sorted(self.running, key=lambda r: r.order):
            while request.status is Status.RUNNING and not self.admission.grow(request):
                victim = max(self._holders(), key=lambda r: r.order)
                yielded.append(victim)
                self._detach(victim)
                victim.preemptions += 1
                self.counters.preemptions += 1
                self.add(victim)
        return yielded

    def _holders(self) -> list[Request]:
        return self.running + [r for cohort in self.cohorts for r in cohort.requests]

    def _detach(self, request: Request) -> None:
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.PREFILL:
            cohort = next(c for c in self.cohorts if request in c.requests)
            self.drop_rows(cohort, request)
            if not cohort.requests:
                self.cohorts.remove(cohort)
        self.admission.release(request)

    def start_running(self, cohort: Cohort) -> None:
        """A cohort has been through all blocks: its requests decode from the next iteration on."""
        self.cohorts.remove(cohort)
        for request in cohort.requests:
            request.status = Status.RUNNING
            request.cached = request.num_tokens
            self.running.append(request)

    def finish(self, request: Request) -> None:
        """A request is done, for whatever reason: free all that it holds."""
        if request.status is not Status.FINISHED:
            self._detach(request)
            request.status = Status.FINISHED
