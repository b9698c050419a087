"""Runs blocks over rows: the only module of the engine that touches tensors.

Prefill goes block by block over a cohort of prompts, because a gate needs the whole prompt at its block before the
block runs. Decode goes through all blocks in one step. In each block the rows are split by path; no row computes
the path that it does not take.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from morph.cache.context_cache import no_units
from morph.cache.snapshot import BlockData
from morph.config import ModelConfig
from morph.engine.request import Request
from morph.engine.weights import BlockWeights, ModelWeights
from morph.engine.workspace import Workspace
from morph.kernels.interface import Kernels, PackedLinear
from morph.memory.pool import Units
from morph.memory.tables import PageTables


@dataclass(eq=False)
class Cohort:
    """Prompts that are prefilled together, all at the same block.

    Attributes:
        hidden: float32 `[rows, hidden]`, residual stream before the block's mixer.
        pending: float32 `[rows, hidden]`, output of the last MLP, not yet added to `hidden`.
        starts: first row of each request, and the total at the end.
        block: next block to run.
    """

    requests: list[Request]
    hidden: torch.Tensor
    pending: torch.Tensor | None
    starts: list[int]
    block: int = 0
    waited: int = 0

    @property
    def rows(self) -> int:
        """Prompt tokens in the cohort."""
        return self.starts[-1]


def _starts(requests: list[Request]) -> list[int]:
    """First row of each request in a cohort, and the total at the end."""
    return list(accumulate((request.rows for request in requests), initial=0))


def _answer_rows(requests: list[Request]) -> list[tuple[int, int]]:
    """Spans of rows that were made in decode before a preemption, in a batch of all rows of these requests.

    They are computed again with the operations of decode: rows of prompts may be rounded more coarsely.
    """
    spans, end = [], 0
    for request in requests:
        begin, end = end + max(0, request.prompt_len - request.cached), end + request.rows
        if begin < end:
            spans.append((begin, end))
    return spans


def _last_answers(requests: list[Request]) -> list[tuple[int, int]]:
    """The same in a batch of each request's last row."""
    return [(i, i + 1) for i, request in enumerate(requests) if request.num_tokens > request.prompt_len]


def _index(units: Units, storage: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(units.astype("int64")).to(storage.device)


@dataclass
class Path:
    """Rows of a batch that take one mixer in one block. `rows` is None when all do."""

    rows: torch.Tensor | None
    slots: torch.Tensor
    count: int


@dataclass
class DecodeBatch:
    """Row lists of a decode batch; layouts are constant in decode, so they live until the members change."""

    requests: list[Request]
    slots: torch.Tensor
    paths: list[tuple[Path | None, Path | None]]
    prepared: Any = None


class ModelRunner:
    """Forward passes of one model over the memory of its requests.

    Args:
        token_tile: rows per tile of the MLP in prefill.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kernels: Kernels,
        tables: PageTables,
        cos: torch.Tensor,
        sin: torch.Tensor,
        token_tile: int = 1024,
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.tables = tables
        self.cos, self.sin = cos, sin
        self.token_tile = token_tile
        self.scale = config.head_dim**-0.5
        self.workspace = Workspace(kernels.device, kernels.activations)
        slots = tables.table.shape[0]
        # Running sums of each block's normed inputs: what the gates of a longer prompt continue from.
        self.sums = torch.zeros(
            (slots, config.num_blocks, config.hidden_size), dtype=torch.float64, device=kernels.device
        )
        self._batch: DecodeBatch | None = None
        self.decoder = kernels.decoder(config, weights, tables, cos, sin, self.sums)

    # ---- prefill

    def start_cohort(self, requests: list[Request]) -> Cohort:
        """Embed the tokens of requests that hold a slot each, those that a cache hit does not cover."""
        tokens = [token for request in requests for token in request.tokens[request.cached :]]
        ids = torch.tensor(tokens, dtype=torch.long, device=self.kernels.device)
        for request in requests:
            self.sums[request.slot] = 0.0
        return Cohort(requests, self.weights.embedding.rows(ids), None, _starts(requests))

    def drop(self, cohort: Cohort, request: Request) -> None:
        """Take a request out of a cohort between two blocks."""
        index = cohort.requests.index(request)
        begin, end = cohort.starts[index], cohort.starts[index + 1]
        cohort.hidden = torch.cat([cohort.hidden[:begin], cohort.hidden[end:]])
        if cohort.pending is not None:
            cohort.pending = torch.cat([cohort.pending[:begin], cohort.pending[end:]])
        del cohort.requests[index]
        cohort.starts = _starts(cohort.requests)

    def norm_block(self, cohort: Cohort) -> torch.Tensor:
        """Normed input of the cohort's next block, float32 `[rows, hidden]`."""
        weights = self.weights.blocks[cohort.block]
        if cohort.pending is None:
            normed = self.kernels.rms_norm(cohort.hidden, weights.input_norm, self.config.rms_norm_eps)
        else:
            normed = self.kernels.add_rms_norm_(
                cohort.hidden, cohort.pending, weights.input_norm, self.config.rms_norm_eps
            )
        return normed

    def sum_prompt(self, request: Request, block: int, rows: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Add the rows of the positions begin…end - 1 to the request's running sum of the block.

        Checkpoints in (begin, end] get a copy of what the sum is there.

        Args:
            rows: `[rows, hidden]`, the request's rows of this prefill; row 0 is the first token that is not cached.

        Returns:
            float64 `[hidden]`, the live buffer.
        """
        sums, first = self.sums[request.slot, block], request.cached
        for checkpoint in request.checkpoints:
            if begin < checkpoint.tokens <= end:
                self.kernels.sum_tokens_(sums, rows[begin - first : checkpoint.tokens - first])
                checkpoint.sums = sums.clone() if request.sums_known else None
                begin = checkpoint.tokens
        if begin < end:
            self.kernels.sum_tokens_(sums, rows[begin - first : end - first])
        return sums

    def restore_sums(self, request: Request, block: int, sums: torch.Tensor | None) -> None:
        """The running sum of the block continues from a cached prefix; None = it is not known."""
        if sums is None:
            request.sums_known = False
        else:
            self.sums[request.slot, block].copy_(sums)

    def restore_block(self, request: Request, block: int, data: BlockData) -> None:
        """Copy what the request will write to: states, ring and tail, or the page that is filled in part."""
        storage, tables = self.tables.pool.storage, self.tables
        if data.attention:
            full, rest = divmod(request.cached, tables.layout.page_tokens)
            if not rest:
                return
            own = tables.units(request.slot, block).reshape(tables.layout.kv_heads, -1)[:, full]
            storage[_index(own, storage)] = storage[_index(data.units[:, full], storage)]
            return
        own = tables.units(request.slot, block)
        storage[_index(own, storage)] = storage[_index(data.units, storage)]
        tables.conv_tails[request.slot, block].copy_(data.tail)

    def save_state(self, request: Request, block: int, data: BlockData) -> None:
        """Copy the block's states, ring and tail, as they are now, to where a checkpoint keeps them."""
        storage, tables = self.tables.pool.storage, self.tables
        storage[_index(data.units, storage)] = storage[_index(tables.units(request.slot, block), storage)]
        data.tail = tables.conv_tails[request.slot, block].clone()

    def left_behind(self, request: Request) -> list[BlockData]:
        """What a request that has finished leaves in its slot, without the units."""
        slot, tables = request.slot, self.tables
        known = request.sums_known and self.config.is_adaptive
        return [
            BlockData(
                bit,
                no_units(),
                None if bit else tables.conv_tails[slot, block].clone(),
                self.sums[slot, block].clone() if known else None,
            )
            for block, bit in enumerate(request.bits)
        ]

    def run_block(self, cohort: Cohort, normed: torch.Tensor, attention: list[bool], last_only: bool = False) -> None:
        """Run the cohort's next block with one decision per request; memory for it is open already.

        Args:
            last_only: nobody reads the block's output but for each request's last token: the cohort keeps those rows.
        """
        weights = self.weights.blocks[cohort.block]
        mixed = self._prefill_mixers(cohort, weights, normed, attention, last_only)
        if last_only:
            cohort.hidden = cohort.hidden[self._last_rows(cohort)]
            cohort.starts = list(range(len(cohort.requests) + 1))
            cohort.pending, normed = None, torch.empty_like(cohort.hidden)
        post = self.kernels.add_rms_norm_(cohort.hidden, mixed, weights.post_norm, self.config.rms_norm_eps, out=normed)
        if cohort.pending is None:
            cohort.pending = torch.empty_like(cohort.hidden)
        self._prefill_mlp(weights, post, cohort.pending)
        for begin, end in _last_answers(cohort.requests) if last_only else _answer_rows(cohort.requests):
            self._mlp(weights, post[begin:end], cohort.pending[begin:end])
        cohort.block += 1

    def _prefill_linear(
        self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, answers: list[tuple[int, int]]
    ) -> torch.Tensor:
        self.kernels.prefill_linear(x, weight, out=out)
        for begin, end in answers:
            self.kernels.linear(x[begin:end], weight, out=out[begin:end])
        return out

    def _prefill_mlp(self, weights: BlockWeights, x: torch.Tensor, out: torch.Tensor) -> None:
        ws, kernels = self.workspace, self.kernels
        if kernels.fuses_mlp(weights.gate_up, weights.down):
            kernels.prefill_mlp(x, weights.gate_up, weights.down, out=out)
            return
        for begin in range(0, x.shape[0], self.token_tile):
            tile = x[begin : begin + self.token_tile]
            hidden = kernels.prefill_linear(tile, weights.gate_up, out=ws.take("mlp", len(tile), weights.gate_up.n))
            act = kernels.silu_mul(hidden, out=ws.take("act", len(tile), weights.down.k))
            kernels.prefill_linear(act, weights.down, out=out[begin : begin + len(tile)])

    def _mlp(self, weights: BlockWeights, x: torch.Tensor, out: torch.Tensor) -> None:
        ws, kernels = self.workspace, self.kernels
        hidden = kernels.linear(x, weights.gate_up, out=ws.take("mlp", x.shape[0], weights.gate_up.n))
        act = kernels.silu_mul(hidden, out=ws.take("act", x.shape[0], weights.down.k))
        kernels.linear(act, weights.down, out=out)

    def _last_rows(self, cohort: Cohort) -> torch.Tensor:
        return torch.tensor(cohort.starts[1:], device=self.kernels.device) - 1

    def _prefill_mixers(
        self,
        cohort: Cohort,
        weights: BlockWeights,
        normed: torch.Tensor,
        attention: list[bool],
        last_only: bool,
    ) -> torch.Tensor:
        """Mixer outputs of all rows, or of each request's last one."""
        rows = len(cohort.requests) if last_only else cohort.rows
        mixed = self.workspace.take("mixed", rows, self.config.hidden_size)
        for path in (True, False):
            members = [i for i, bit in enumerate(attention) if bit is path]
            if not members:
                continue
            spans = [(cohort.starts[i], cohort.starts[i + 1]) for i in members]
            requests = [cohort.requests[i] for i in members]
            run = self._prefill_attention if path else self._prefill_ssm
            if len(members) == len(attention):
                run(weights, cohort.block, normed, requests, mixed, last_only)
                continue
            # Spans are contiguous, so gather and scatter are a few block copies.
            x = torch.cat([normed[begin:end] for begin, end in spans])
            if last_only:
                spans = [(i, i + 1) for i in members]
            made = sum(end - begin for begin, end in spans)
            result = run(weights, cohort.block, x, requests, mixed.new_empty(made, mixed.shape[1]), last_only)
            at = 0
            for begin, end in spans:
                mixed[begin:end] = result[at : at + end - begin]
                at += end - begin
        return mixed

    def _prefill_attention(
        self,
        weights: BlockWeights,
        block: int,
        x: torch.Tensor,
        requests: list[Request],
        out: torch.Tensor,
        last_only: bool,
    ) -> torch.Tensor:
        assert weights.attention is not None
        mixer, kernels, config, tables = weights.attention, self.kernels, self.config, self.tables
        answers = _answer_rows(requests)
        qkv = self.workspace.take("qkv", x.shape[0], config.qkv_size)
        self._prefill_linear(x, mixer.qkv, qkv, answers)
        lengths = [request.rows for request in requests]
        positions = torch.cat(
            [torch.arange(r.cached, r.num_tokens, dtype=torch.int32) for r in requests]
        ).to(kernels.device)  # fmt: skip
        slots = torch.repeat_interleave(
            torch.tensor([request.slot for request in requests], dtype=torch.int32), torch.tensor(lengths)
        ).to(kernels.device)
        pages = tables.layout.max_pages
        kernels.rope_write_kv_(
            qkv, self.cos, self.sin, positions, mixer.q_norm, mixer.k_norm, config.rms_norm_eps,
            tables.pool.storage, tables.table[:, block], slots, pages,
        )  # fmt: skip
        heads = self.workspace.take("heads", out.shape[0], config.q_size)
        begin = made = 0
        for request in requests:
            n, cached = request.num_tokens, request.cached
            first = n - 1 if last_only else cached
            # The prompt's rows, then those of an answer that was begun before.
            for start, stop, exact in ((first, request.prompt_len, False), (max(first, request.prompt_len), n, True)):
                if start >= stop:
                    continue
                kernels.prefill_attention(
                    qkv[begin + start - cached : begin + stop - cached, : config.q_size], tables.pool.storage,
                    tables.table[request.slot, block], pages, start, self.scale,
                    out=heads[made : made + stop - start], exact=exact,
                )  # fmt: skip
                made += stop - start
            begin += request.rows
        return self._prefill_linear(heads, mixer.out, out, _last_answers(requests) if last_only else answers)

    def _prefill_ssm(
        self,
        weights: BlockWeights,
        block: int,
        x: torch.Tensor,
        requests: list[Request],
        out: torch.Tensor,
        last_only: bool,
    ) -> torch.Tensor:
        assert weights.ssm is not None
        mixer, kernels, tables = weights.ssm, self.kernels, self.tables
        answers = _answer_rows(requests)
        inputs = self.workspace.take("inputs", x.shape[0], mixer.inputs.n)
        self._prefill_linear(x, mixer.inputs, inputs, answers)
        heads = self.workspace.take("heads", x.shape[0], self.config.q_size)
        ends = []
        at = 0
        for request in requests:
            start = request.cached
            stops = {checkpoint.tokens: checkpoint for checkpoint in request.checkpoints}
            for stop in sorted({*stops, request.num_tokens}):
                n = stop - start
                kernels.gdn_prefill(
                    inputs[at : at + n], mixer.params, tables.pool.storage, tables.table[request.slot, block],
                    tables.conv_tails[request.slot, block], has_state=start > 0, start=start, out=heads[at : at + n],
                )  # fmt: skip
                if stop in stops:
                    self.save_state(request, block, stops[stop].blocks[block])
                at, start = at + n, stop
            ends.append(at - 1)
        if last_only:
            last = torch.tensor(ends, device=kernels.device)
            inputs, heads, answers = inputs[last], heads[last], _last_answers(requests)
        self._output_gate(weights, inputs, heads, answers)
        return self._prefill_linear(heads, mixer.out, out, answers)

    def _output_gate(
        self, weights: BlockWeights, inputs: torch.Tensor, heads: torch.Tensor, exact: list[tuple[int, int]]
    ) -> None:
        assert weights.ssm is not None
        mixer = weights.ssm
        down = inputs[:, mixer.inputs.n - mixer.gate_up.k :]
        gate = self.workspace.take("gate", down.shape[0], mixer.gate_up.n)
        self._prefill_linear(down, mixer.gate_up, gate, exact)
        self.kernels.gate_silu_mul_(heads, gate)

    def finish_cohort(self, cohort: Cohort) -> torch.Tensor:
        """Logits after the last token of each request, float32 `[requests, vocab]`. Ends the cohort."""
        assert cohort.pending is not None
        self.kernels.add_rms_norm_(
            cohort.hidden, cohort.pending, self.weights.norm, self.config.rms_norm_eps, out=cohort.pending
        )
        return self.kernels.linear(cohort.pending[self._last_rows(cohort)], self.weights.head)

    def prompt_logits(self, cohort: Cohort, index: int, begin: int, end: int) -> torch.Tensor:
        """Logits at positions `begin…end-1` of one request, after `finish_cohort`; float32 `[n, vocab]`."""
        assert cohort.pending is not None
        at = cohort.starts[index] - cohort.requests[index].cached
        return self.kernels.linear(cohort.pending[at + begin : at + end], self.weights.head)

    # ---- decode

    def decode(self, requests: list[Request]) -> torch.Tensor:
        """One step for running requests: feeds each one's last token, returns logits float32 `[requests, vocab]`."""
        batch = self._batch
        if batch is None or batch.requests != requests:
            batch = self._batch = self._make_batch(requests)
        kernels, config = self.kernels, self.config
        device = kernels.device
        tokens = torch.tensor([request.tokens[-1] for request in requests], device=device)
        positions = torch.tensor([request.cached for request in requests], dtype=torch.int32, device=device)
        if self.decoder is not None:
            if batch.prepared is None:
                batch.prepared = self.decoder.prepare(batch.paths)
            fed = tokens if self.decoder.embeds else self.weights.embedding.rows(tokens)
            return self.decoder.run(batch.prepared, fed, positions, batch.slots)
        hidden = self.weights.embedding.rows(tokens)
        pending: torch.Tensor | None = None
        picked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def pick(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
            """Positions of the path's rows and how many keys each sees; blocks with equal rows share them."""
            if id(path) not in picked:
                at = positions if path.rows is None else positions[path.rows]
                picked[id(path)] = (at, at + 1)
            return picked[id(path)]

        count = len(requests)
        normed = self.workspace.take("normed", count, config.hidden_size)
        mixed = self.workspace.take("mixed", count, config.hidden_size)
        for block, weights in enumerate(self.weights.blocks):
            if pending is None:
                kernels.rms_norm(hidden, weights.input_norm, config.rms_norm_eps, out=normed)
                pending = torch.empty_like(hidden)
            else:
                kernels.add_rms_norm_(hidden, pending, weights.input_norm, config.rms_norm_eps, out=normed)
            if config.is_adaptive:
                self._add_to_sums(batch, block, normed)
            attention, ssm = batch.paths[block]
            for path, run in ((attention, self._decode_attention), (ssm, self._decode_ssm)):
                if path is None:
                    continue
                if path.rows is None:
                    run(weights, block, normed, path, *pick(path), mixed)
                else:
                    rows = normed[path.rows]
                    mixed[path.rows] = run(weights, block, rows, path, *pick(path), torch.empty_like(rows))
            kernels.add_rms_norm_(hidden, mixed, weights.post_norm, config.rms_norm_eps, out=normed)
            self._mlp(weights, normed, pending)
        assert pending is not None
        kernels.add_rms_norm_(hidden, pending, self.weights.norm, config.rms_norm_eps, out=normed)
        return kernels.linear(normed, self.weights.head)

    def _add_to_sums(self, batch: DecodeBatch, block: int, normed: torch.Tensor) -> None:
        self.sums[:, block].index_add_(0, batch.slots.long(), normed.double())

    def _decode_attention(
        self,
        weights: BlockWeights,
        block: int,
        x: torch.Tensor,
        path: Path,
        positions: torch.Tensor,
        lens: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        assert weights.attention is not None
        mixer, kernels, config, tables = weights.attention, self.kernels, self.config, self.tables
        qkv = kernels.linear(x, mixer.qkv, out=self.workspace.take("qkv", path.count, config.qkv_size))
        table, pages = tables.table[:, block], tables.layout.max_pages
        kernels.rope_write_kv_(
            qkv, self.cos, self.sin, positions, mixer.q_norm, mixer.k_norm, config.rms_norm_eps,
            tables.pool.storage, table, path.slots, pages,
        )  # fmt: skip
        heads = kernels.decode_attention(
            qkv[:, : config.q_size], tables.pool.storage, table, pages, path.slots, lens, self.scale,
            out=self.workspace.take("heads", path.count, config.q_size),
        )  # fmt: skip
        return kernels.linear(heads, mixer.out, out=out)

    def _decode_ssm(
        self,
        weights: BlockWeights,
        block: int,
        x: torch.Tensor,
        path: Path,
        positions: torch.Tensor,
        lens: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        assert weights.ssm is not None
        mixer, kernels, tables = weights.ssm, self.kernels, self.tables
        inputs = kernels.linear(x, mixer.inputs, out=self.workspace.take("inputs", path.count, mixer.inputs.n))
        heads = kernels.gdn_decode(
            inputs, mixer.params, tables.pool.storage, tables.table[:, block], path.slots,
            tables.conv_tails[:, block], positions,
            out=self.workspace.take("heads", path.count, self.config.q_size),
        )  # fmt: skip
        down = inputs[:, mixer.inputs.n - mixer.gate_up.k :]
        gate = kernels.linear(down, mixer.gate_up, out=self.workspace.take("gate", path.count, mixer.gate_up.n))
        kernels.gate_silu_mul_(heads, gate)
        return kernels.linear(heads, mixer.out, out=out)

    def _make_batch(self, requests: list[Request]) -> DecodeBatch:
        device = self.kernels.device
        slots = torch.tensor([request.slot for request in requests], dtype=torch.int32, device=device)
        groups: dict[tuple[bool, ...], tuple[Path | None, Path | None]] = {}
        paths = []
        for block in range(self.config.num_blocks):
            bits = tuple(request.bits[block] for request in requests)
            if bits not in groups:
                groups[bits] = (self._path(bits, True, slots), self._path(bits, False, slots))
            paths.append(groups[bits])
        return DecodeBatch(list(requests), slots, paths)

    def _path(self, bits: tuple[bool, ...], path: bool, slots: torch.Tensor) -> Path | None:
        rows = [i for i, bit in enumerate(bits) if bit is path]
        if not rows:
            return None
        if len(rows) == len(bits):
            return Path(None, slots, len(rows))
        index = torch.tensor(rows, device=slots.device)
        return Path(index, slots[index], len(rows))

    def forget_batch(self) -> None:
        """Slots changed hands: the row lists of the last decode batch are stale."""
        self._batch = None
