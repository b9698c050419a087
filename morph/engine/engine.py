"""The engine: requests in, tokens out, one iteration at a time. Knows no threads and no HTTP."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import torch

from morph.cache.context_cache import ContextCache
from morph.cache.placement import first_message
from morph.cache.snapshot import BlockData
from morph.cache.tree import encode
from morph.config import EngineConfig, ModelConfig
from morph.engine.admission import Admission
from morph.engine.detokenizer import Decoder, Detokenizer
from morph.engine.device_gates import DeviceGates
from morph.engine.device_sampling import sample_on_device
from morph.engine.grammar import Grammars
from morph.engine.pace import Pace
from morph.engine.params import FinishReason, SamplingParams
from morph.engine.request import Request, Status
from morph.engine.runner import Cohort, ModelRunner
from morph.engine.sampling import sample, token_logprob
from morph.engine.scheduler import Scheduler
from morph.errors import InvalidRequest
from morph.gate.policy import GatePolicy, UtilityPolicy
from morph.layout import Layout

MOST_DECISIONS = 4096
"""Prompts whose layouts are remembered."""
SCORE_TILE = 256
"""Rows of prompt logits made at a time: 256 x vocabulary x 4 bytes."""

PolicyFactory = Callable[[float], GatePolicy]


class Engine:
    """Continuous batching over one model.

    Args:
        policy_for: makes the gate policy of a budget; None when the model has no gates.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine_config: EngineConfig,
        runner: ModelRunner,
        tokenizer: Decoder,
        policy_for: PolicyFactory | None,
        max_context: int,
        cache: ContextCache | None = None,
    ) -> None:
        self.config = config
        self.engine_config = engine_config
        self.runner = runner
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.cache = cache
        self.admission = Admission(runner.tables, config, cache)
        self.scheduler = Scheduler(self.admission, engine_config.cohort_tokens, runner.drop)
        self.grammars = Grammars(tokenizer, config.vocab_size, config.eos_token_ids)
        self.requests: dict[str, Request] = {}
        self._policy_for = policy_for
        self._policies: dict[float, GatePolicy] = {}
        self._decided: dict[tuple[str, float | None, bytes], tuple[tuple[bool, ...], tuple[float, ...]]] = {}
        self._order = 0
        on_device = runner.kernels.device.type != "cpu"
        self._device_gates = DeviceGates(runner.kernels.device) if on_device else None
        self._pace = Pace(engine_config.decode_stall_ms / 1e3) if on_device else None
        self._sample = sample_on_device if on_device else sample
        self.steps = 0
        self.decode_rows = 0
        self.prefill_rows = 0

    # ---- requests

    def make_request(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        priority: int = 0,
        score_from: int | None = None,
    ) -> Request:
        """Check a request against this model; safe to call from any thread.

        Args:
            prompt: token ids.
            score_from: prompt position whose successor is the first scored token; such a request makes no tokens.

        Raises:
            InvalidRequest: names the field, the value and the remedy.
        """
        self._check_prompt(prompt, params)
        room = self.max_context - len(prompt)
        if score_from is not None:
            max_tokens = 0
        elif params.max_tokens is None:
            max_tokens = room
        else:
            max_tokens = params.max_tokens
        if max_tokens > room:
            raise InvalidRequest(
                f"max_tokens is {max_tokens} and the prompt has {len(prompt)} tokens, together more than the "
                f"context of {self.max_context}; use at most {room}",
                "max_tokens",
            )
        bad = [token for token in params.logit_bias if token >= self.config.vocab_size]
        if bad:
            raise InvalidRequest(
                f"logit_bias has token {bad[0]}, the vocabulary has {self.config.vocab_size}", "logit_bias"
            )
        fixed, policy, budget = self._choose(params)
        request = Request(
            id=request_id,
            tokens=list(prompt),
            prompt_len=len(prompt),
            params=params,
            order=0,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            max_tokens=max_tokens,
            detokenizer=Detokenizer(self.tokenizer, params.stop),
            fixed=fixed,
            budget=budget,
            policy=policy,
            carry=policy.initial_carry() if policy is not None else None,
            gate_tokens=params.gate_tokens or self._boundary(prompt),
            priority=priority,
            score_from=score_from,
            layout_source="gate" if policy is not None else "request",
            constraint=self.grammars.start(params.grammar) if params.grammar is not None else None,
        )
        if not self.admission.fits_ever(request):
            total = self.admission.pool.num_units
            raise InvalidRequest(
                f"prompt of {len(prompt)} tokens + max_tokens {max_tokens} can need more memory than the pool has "
                f"({total} units of {self.admission.pool.unit_bytes} bytes); shorten it or start the engine with "
                f"more memory",
                "max_tokens",
            )
        return request

    def _boundary(self, prompt: list[int]) -> int:
        """How many tokens the gates see when the request does not say."""
        if self.engine_config.layout_boundary == "first_message":
            return first_message(prompt, self.admission.message_ends)
        return len(prompt)

    def _check_prompt(self, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
        if len(prompt) >= self.max_context:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens, the context is {self.max_context} with room for at least "
                f"one answer token; shorten the prompt",
                "prompt",
            )
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequest(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}", "prompt")
        if params.gate_tokens is not None and params.gate_tokens > len(prompt):
            raise InvalidRequest(
                f"gate_tokens is {params.gate_tokens}, the prompt has {len(prompt)} tokens", "gate_tokens"
            )

    def _choose(self, params: SamplingParams) -> tuple[Layout | None, GatePolicy | None, float | None]:
        """Fixed layout, or gate policy with its budget."""
        kinds = self.config.block_kinds
        if params.layout in ("attention", "ssm"):
            # The words mean "as far as the model has it"; bits are taken literally.
            bit = params.layout == "attention"
            return Layout.from_bits(bit if kind == "adaptive" else kind == "attention" for kind in kinds), None, None
        if params.layout != "auto":
            layout = Layout.parse(params.layout, self.config.num_blocks)
            for block, (bit, kind) in enumerate(zip(layout, kinds, strict=True)):
                if kind != "adaptive" and bit != (kind == "attention"):
                    raise InvalidRequest(
                        f"layout {params.layout!r} asks for {'attention' if bit else 'ssm'} in block {block}, "
                        f"which has {kind} only",
                        "layout",
                    )
            return layout, None, None
        if not self.config.is_adaptive:
            return Layout.from_bits(kind == "attention" for kind in kinds), None, None
        budget = params.attention_budget
        if budget is None:
            budget = self.engine_config.attention_budget
        if self._policy_for is None:
            raise InvalidRequest(
                "layout is 'auto' but the model has no gates; name a layout or fit gates with `morph gate fit`",
                "layout",
            )
        if budget not in self._policies:
            if len(self._policies) >= 256:
                self._policies.pop(next(iter(self._policies)))
            self._policies[budget] = self._policy_for(budget)
        return None, self._policies[budget], float(budget)

    def add(self, request: Request) -> None:
        """Queue a request made by `make_request`."""
        if request.id in self.requests:
            raise InvalidRequest(f"request id {request.id!r} is already in use", "request_id")
        request.order = self._order
        self._order += 1
        self._recall(request)
        self.requests[request.id] = request
        self.scheduler.add(request)

    def _recall(self, request: Request) -> None:
        """The gates' choices are a function of what they see: known ones need not be made again."""
        if request.policy is None or self.cache is None or request.params.cache_affinity != 0:
            return
        known = self._decided.get(_what_gates_see(request))
        if known is not None:
            request.bits, request.utilities = list(known[0]), list(known[1])

    def _remember(self, request: Request) -> None:
        """Keep the choices of a request whose layout its gates alone made."""
        if request.policy is None or self.cache is None or request.layout_source != "gate":
            return
        if len(self._decided) >= MOST_DECISIONS:
            self._decided.pop(next(iter(self._decided)))
        self._decided[_what_gates_see(request)] = (tuple(request.bits), tuple(request.utilities))

    def abort(self, request_id: str) -> Request | None:
        """Stop a request at once and free all that it holds; None when there is no such request."""
        request = self.requests.get(request_id)
        if request is None or request.finished:
            return None
        self._finish(request, "abort")
        self.scheduler.counters.aborted += 1
        return request

    # ---- one iteration

    @property
    def idle(self) -> bool:
        """True when there is nothing to do."""
        return self.scheduler.idle

    def step(self) -> list[Request]:
        """One iteration; returns the requests that have something new to say."""
        self.steps += 1
        scheduler = self.scheduler
        members = scheduler.next_members()
        if members:
            scheduler.cohorts.append(self.runner.start_cohort(members))
        changed = self._decode()
        cohort = scheduler.next_cohort(self.config.num_blocks)
        if cohort is not None:
            try:
                changed += self._prefill(cohort)
            except torch.OutOfMemoryError as error:
                changed += self._give_up(cohort, error)
        return changed

    def _give_up(self, cohort: Cohort, error: torch.OutOfMemoryError) -> list[Request]:
        """The device has no room for a cohort's activations: its requests fail, all others go on."""
        members = list(cohort.requests)
        cohort.pending = None
        for request in members:
            request.error = (
                f"the device ran out of memory for the activations of {cohort.rows} prompt tokens ({error}); start the "
                "engine with less memory_bytes or a smaller cohort_tokens, or shorten the prompt"
            )
            self.scheduler.counters.failed += 1
            self._finish(request, "error")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return members

    def _decode(self) -> list[Request]:
        yielded = self.scheduler.make_room()
        if yielded:
            self.runner.forget_batch()
        batch = list(self.scheduler.running)
        if not batch:
            return []
        logits = self.runner.decode(batch)
        self.decode_rows += len(batch)
        for request in batch:
            request.cached += 1
        self._append_tokens(batch, logits)
        return batch

    def _prefill(self, cohort: Cohort) -> list[Request]:
        blocks = self.config.num_blocks
        share = blocks
        if self.scheduler.running or len(self.scheduler.cohorts) > 1:
            share = max(1, self.engine_config.prefill_tokens * blocks // cohort.rows)
            if self._pace is not None:
                share = self._pace.blocks(cohort.rows) or share
        share, prompt_rows = min(share, blocks - cohort.block), cohort.rows
        begin = self._pace.start() if self._pace is not None else None
        for _ in range(share):
            self._prefill_block(cohort)
            if not cohort.requests:
                break
        if self._pace is not None and begin is not None:
            self._pace.stop(begin, prompt_rows, share)
        if cohort.block < blocks or not cohort.requests:
            return []
        logits = self.runner.finish_cohort(cohort)
        members = list(cohort.requests)
        self.prefill_rows += sum(request.rows for request in members)
        for index, request in enumerate(members):
            if _wants_prompt_logits(request):
                self._score_prompt(cohort, index, request)
        for request in members:
            self.admission.publish(request)
            self._remember(request)
        self.scheduler.start_running(cohort)
        self.runner.forget_batch()
        generating = [(i, r) for i, r in enumerate(members) if r.score_from is None]
        for request in members:
            if request.score_from is not None:
                self._finish(request, "length")
        if generating:
            rows = logits if len(generating) == len(members) else logits[[i for i, _ in generating]]
            self._append_tokens([r for _, r in generating], rows)
        return members

    def _prefill_block(self, cohort: Cohort) -> None:
        block = cohort.block
        normed = self.runner.norm_block(cohort)
        if self.config.is_adaptive:
            for request in cohort.requests:
                if request.hit is not None:
                    self.runner.restore_sums(request, block, request.hit.sums(request.bits[:block]))
        utilities = self._device_gates.predict(self.runner, cohort, normed) if self._device_gates is not None else {}
        strays: list[Request] = []
        for index, request in enumerate(cohort.requests):
            rows = normed[cohort.starts[index] : cohort.starts[index + 1]]
            if len(request.bits) <= block:
                request.bits.append(self._decide(request, block, rows, utilities.get(request.id)))
            elif self.config.is_adaptive:
                self.runner.sum_prompt(request, block, rows, request.cached, request.num_tokens)
            data = None
            if request.hit is not None:
                data = request.hit.block(request.bits[: block + 1]) or self._adopt(request, block)
                if data is None:
                    strays.append(request)
                    continue
            self.admission.open_block(request, block, request.bits[block])
            if data is not None:
                self.runner.restore_block(request, block, data)
            self.admission.open_checkpoints(request, block)
        for request in strays:
            normed = self._start_again(cohort, request, normed)
        if not cohort.requests:
            return
        last_only = block + 1 == self.config.num_blocks and not any(map(_wants_prompt_logits, cohort.requests))
        self.runner.run_block(cohort, normed, [request.bits[block] for request in cohort.requests], last_only)

    def _adopt(self, request: Request, block: int) -> BlockData | None:
        """Take the stored branch against the gate, where the request's affinity allows; else None.

        When the tolerance does not suffice, the request is left with the gates' own choices up to the first one that
        was not followed.
        """
        affinity, policy, hit = request.params.cache_affinity, request.policy, request.hit
        if affinity == 0 or hit is None or not isinstance(policy, UtilityPolicy) or len(request.bits) != block + 1:
            return None
        own = list(request.bits)
        data = hit.block([*own[:-1], not own[-1]])
        regret = request.regret + policy.regret(block, request.utilities[block], request.gate_tokens)
        if affinity == "auto":
            assert self.cache is not None
            saved = self.cache.cost.flops(sum(own), hit.tokens) / policy.cost.flops_per_second
            tolerance = policy.tau * saved
        else:
            tolerance = float(affinity)
        if data is not None and regret <= tolerance and math.isfinite(regret):
            request.gate_bits = request.gate_bits or own
            request.bits[-1], request.regret = not own[-1], regret
            request.layout_source = "cache"
            return data
        if request.gate_bits is not None:
            request.bits, request.gate_bits = request.gate_bits, None
            del request.utilities[len(request.bits) :]
            request.regret, request.layout_source = 0.0, "gate"
        return None

    def _start_again(self, cohort: Cohort, request: Request, normed: torch.Tensor) -> torch.Tensor:
        """The gates chose what nobody stored at the request's hit: it starts again with the decisions that it has.

        Returns:
            `normed` without the request's rows.
        """
        index = cohort.requests.index(request)
        begin, end = cohort.starts[index], cohort.starts[index + 1]
        assert self.cache is not None
        self.cache.counts.kinds["restart"] += 1
        self.scheduler.start_again(request)
        return torch.cat([normed[:begin], normed[end:]])

    def _decide(self, request: Request, block: int, rows: torch.Tensor, utility: float | None = None) -> bool:
        """The block's bit, from what the gate sees of the prompt; keeps the running sums of all its tokens.

        Args:
            utility: û where it was predicted on the device; the sums then hold what the gate saw already.
        """
        seen = request.gate_tokens if request.policy is not None else request.num_tokens
        sums = None
        if utility is None and self.config.is_adaptive:
            sums = self.runner.sum_prompt(request, block, rows, request.cached, seen)
        if request.policy is None:
            assert request.fixed is not None
            return request.fixed[block]
        kind = self.config.block_kinds[block]
        if kind == "adaptive":
            if utility is not None:
                decision = request.policy.decided(block, utility, seen, request.carry)
            else:
                assert sums is not None
                decision = request.policy.decide(block, sums, rows[seen - 1 - request.cached], seen, request.carry)
            request.carry = decision.carry
            request.utilities.append(decision.utility)
            bit = decision.attention
        else:
            request.utilities.append(0.0)
            bit = kind == "attention"
        if seen < request.num_tokens:
            self.runner.sum_prompt(request, block, rows, seen, request.num_tokens)
        return bit

    # ---- tokens

    def _append_tokens(self, requests: list[Request], logits: torch.Tensor) -> None:
        for request, token in zip(requests, self._sample(logits, requests), strict=True):
            if token is None:
                request.error = "the model gave logits that are not finite"
                self.scheduler.counters.failed += 1
                self._finish(request, "error")
                continue
            if request.first_token is None:
                request.first_token = time.perf_counter()
            self._append(request, token)

    def _append(self, request: Request, token: int) -> None:
        params = request.params
        request.tokens.append(token)
        if request.constraint is not None:
            request.constraint.accept(token)
        request.counts[token] = request.counts.get(token, 0) + 1
        made = request.num_tokens - request.prompt_len
        if token in self.config.eos_token_ids and not params.ignore_eos:
            self._finish(request, "stop")
        elif token in params.stop_token_ids:
            request.stop_reason = token
            self._finish(request, "stop")
        else:
            stop = request.detokenizer.push(token)
            if stop is not None:
                request.stop_reason = stop
                self._finish(request, "stop", cut=True)
            elif request.constraint is not None and request.constraint.error is not None:
                request.error = f"the grammar failed: {request.constraint.error}"
                self.scheduler.counters.failed += 1
                self._finish(request, "error")
            elif request.constraint is not None and request.constraint.finished:
                self._finish(request, "stop")
            elif made >= request.max_tokens:
                self._finish(request, "length")

    def _finish(self, request: Request, reason: FinishReason, cut: bool = False) -> None:
        request.detokenizer.finish(stopped=cut)
        request.finish_reason = reason
        request.finished_at = time.perf_counter()
        if self.cache is not None and reason in ("stop", "length") and request.score_from is None:
            self._donate(request)
        self.scheduler.finish(request)
        self.scheduler.counters.finished += reason in ("stop", "length")
        self.requests.pop(request.id, None)
        self.runner.forget_batch()

    def _donate(self, request: Request) -> None:
        """What a finished answer leaves in memory serves the conversation's next turn."""
        if request.status is Status.RUNNING and request.cached >= request.prompt_len:
            self.admission.donate(request, self.runner.left_behind(request))

    def _score_prompt(self, cohort: Cohort, index: int, request: Request) -> None:
        """Log probabilities of prompt tokens; entry i belongs to token i, None where nothing precedes or asks."""
        begin = request.score_from or 0
        alternatives = request.params.prompt_logprobs or 0
        result: list[Any] = [None] * (begin + 1)
        for at in range(begin, request.prompt_len - 1, SCORE_TILE):
            end = min(at + SCORE_TILE, request.prompt_len - 1)
            logprobs = torch.log_softmax(self.runner.prompt_logits(cohort, index, at, end), dim=-1)
            for row, position in enumerate(range(at, end)):
                result.append(token_logprob(logprobs[row], request.tokens[position + 1], alternatives))
        request.prompt_logprobs = result

    # ---- books

    def check(self) -> None:
        """Raise AssertionError when the engine is idle and a unit or slot is still held."""
        pool, tables = self.admission.pool, self.runner.tables
        pool.check()
        if self.cache is not None:
            self.cache.check()
        if self.idle:
            cached = self.cache.held_units if self.cache is not None else 0
            leaked = pool.num_units - pool.free_units - cached
            assert leaked == 0, f"{leaked} units leaked"
            assert pool.reserved_units == 0, f"{pool.reserved_units} reserved units leaked"
            assert tables.free_slots == tables.table.shape[0], "a slot leaked"
            assert not self.requests, f"requests {list(self.requests)} leaked"

    def stats(self) -> dict[str, Any]:
        """Counters and gauges for metrics; plain numbers."""
        scheduler, pool = self.scheduler, self.admission.pool
        held = self.runner.tables.totals()
        running = list(scheduler.running)
        bits = [bit for request in running for bit in request.bits]
        return {
            "running": len(running),
            "waiting": len(scheduler.waiting),
            "prefilling": sum(len(cohort.requests) for cohort in scheduler.cohorts),
            "steps": self.steps,
            "decode_tokens": self.decode_rows,
            "prefill_tokens": self.prefill_rows,
            "preemptions": scheduler.counters.preemptions,
            "finished": scheduler.counters.finished,
            "aborted": scheduler.counters.aborted,
            "failed": scheduler.counters.failed,
            "units_total": pool.num_units,
            "units_free": pool.free_units,
            "units_reserved": pool.reserved_units,
            "units_attention": held["attention"],
            "units_ssm": held["ssm"],
            "unit_bytes": pool.unit_bytes,
            "free_slots": self.runner.tables.free_slots,
            "attention_share": sum(bits) / len(bits) if bits else None,
            "distinct_layouts": len({tuple(request.bits) for request in running}),
            **(self.cache.stats() if self.cache is not None else {}),
        }


def _wants_prompt_logits(request: Request) -> bool:
    """True while log probabilities of the request's prompt tokens are still to be made."""
    return request.params.prompt_logprobs is not None and request.prompt_logprobs is None


def _what_gates_see(request: Request) -> tuple[str, float | None, bytes]:
    seen = encode(request.tokens[: request.gate_tokens])
    return request.namespace, request.budget, hashlib.blake2b(seen, digest_size=16).digest()
