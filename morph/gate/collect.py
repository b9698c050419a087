"""Measures what a layout costs a request: KL(base || model) over the base's answer, and what the gates see of the prompt.

A row of work is one request under one rule. A rule is a threshold per block: attention iff û exceeds it. ±inf fixes a
block, so fixed layouts and gated ones run in the same batch, block by block, as they do in the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from morph.gate.answers import Requests
from morph.model.model import MorphModel

Utility = Callable[[int, torch.Tensor], torch.Tensor]
"""û of a block from features float32 `[rows, 2 * hidden + 1]`; float32 `[rows]`."""


@dataclass
class Measurement:
    """Results of `measure`, one row per job.

    Attributes:
        request: index of the request. layouts: bool `[rows, blocks]`, True = attention.
        loss: float32 `[rows]`, nats of KL per answer token.
        features: float16 `[rows, blocks, 2 * hidden]` (mean and last normed input), or None. On the model's device.
        utilities: float32 `[rows, blocks]`, or None when no gates ran.
    """

    request: torch.Tensor
    layouts: torch.Tensor
    loss: torch.Tensor
    features: torch.Tensor | None = None
    utilities: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.request)

    def select(self, rows: torch.Tensor) -> Measurement:
        """Some rows, by index or mask."""
        return Measurement(
            self.request[rows],
            self.layouts[rows],
            self.loss[rows],
            None if self.features is None else self.features[rows.to(self.features.device)],
            None if self.utilities is None else self.utilities[rows],
        )


def fixed_rules(layouts: torch.Tensor) -> torch.Tensor:
    """Thresholds that force layouts: bool `[rows, blocks]` to float32 of -inf (attention) and inf."""
    return torch.where(layouts, -math.inf, math.inf)


def with_log_length(features: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Append log n: `[rows, 2 * hidden]` and `[rows]` to float32 `[rows, 2 * hidden + 1]`."""
    return torch.cat([features.float(), lengths.float().log()[:, None]], dim=1)


@torch.no_grad()
def measure(
    model: MorphModel,
    requests: Requests,
    jobs: Sequence[tuple[int, torch.Tensor]],
    utility: Utility | None = None,
    keep_features: bool = False,
    batch_tokens: int = 65_536,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Run jobs and compare with the base.

    Args:
        jobs: request index and rules float32 `[rules, blocks]`; jobs of one request are best given together.
        utility: the gates, needed where a rule is finite.
        batch_tokens: padded tokens of a batch, the base's row included.
        progress: called with rows done and rows in all.

    Returns:
        Rows in the order of the jobs.
    """
    blocks, hidden = model.config.num_blocks, model.config.hidden_size
    starts = torch.tensor([0, *(len(rules) for _, rules in jobs)]).cumsum(0)
    total = int(starts[-1])
    device = model.embedding.weight.device
    out = Measurement(
        torch.repeat_interleave(torch.tensor([request for request, _ in jobs]), starts.diff()),
        torch.empty(total, blocks, dtype=torch.bool),
        torch.empty(total),
        torch.empty(total, blocks, 2 * hidden, dtype=torch.float16, device=device) if keep_features else None,
        torch.full((total, blocks), math.nan) if utility is not None else None,
    )
    done = 0
    for group in _pack(requests, jobs, batch_tokens):
        rows = torch.cat([torch.arange(int(starts[j]), int(starts[j + 1])) for j in group])
        part = _measure_batch(model, requests, [jobs[j] for j in group], utility, keep_features)
        out.layouts[rows], out.loss[rows] = part.layouts, part.loss
        if out.features is not None and part.features is not None:
            out.features[rows.to(device)] = part.features
        if out.utilities is not None and part.utilities is not None:
            out.utilities[rows] = part.utilities
        done += len(rows)
        if progress is not None:
            progress(done, total)
    return out


def _pack(requests: Requests, jobs: Sequence[tuple[int, torch.Tensor]], batch_tokens: int) -> list[list[int]]:
    """Jobs in batches of similar length, each with the base's row beside its rules'."""

    def size(job: int) -> tuple[int, int]:
        request, rules = jobs[job]
        return len(requests.prompts[request]) + len(requests.answers[request]), len(rules) + 1

    groups: list[list[int]] = []
    rows = longest = 0
    for job in sorted(range(len(jobs)), key=lambda j: -size(j)[0]):
        length, more = size(job)
        if groups and (rows + more) * longest <= batch_tokens:
            groups[-1].append(job)
            rows += more
        else:
            groups.append([job])
            rows, longest = more, length
    return groups


def _measure_batch(
    model: MorphModel,
    requests: Requests,
    jobs: Sequence[tuple[int, torch.Tensor]],
    utility: Utility | None,
    keep_features: bool,
) -> Measurement:
    device, blocks = model.embedding.weight.device, model.config.num_blocks
    owners = [request for request, rules in jobs for _ in range(len(rules) + 1)]
    base = fixed_rules(torch.ones(1, blocks, dtype=torch.bool))
    rules = torch.cat([torch.cat([base, job_rules]) for _, job_rules in jobs])
    prompts = torch.tensor([len(requests.prompts[i]) for i in owners], device=device)
    answers = [len(requests.answers[i]) for i in owners]
    sequences = [requests.prompts[i] + requests.answers[i] for i in owners]
    longest = max(map(len, sequences))
    tokens = torch.zeros(len(owners), longest, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
    tokens = tokens.to(device)

    seen = torch.arange(longest, device=device)[None, :] < prompts[:, None]
    share = seen.float() / prompts[:, None]
    index = torch.arange(len(owners), device=device)
    layouts = torch.empty(len(owners), blocks, dtype=torch.bool)
    features: list[torch.Tensor] = []
    utilities: list[torch.Tensor] = []
    gated = bool(torch.isfinite(rules).any())

    def choose(block: int, normed: torch.Tensor) -> list[bool]:
        bits = rules[:, block] < 0
        if keep_features or gated:
            mean = torch.bmm(share[:, None], normed.float()).squeeze(1)
            seen_now = torch.cat([mean, normed[index, prompts - 1].float()], dim=1)
            if keep_features:
                features.append(seen_now.half())
            if gated:
                assert utility is not None, "rules with finite thresholds need gates"
                value = utility(block, with_log_length(seen_now, prompts)).cpu()
                utilities.append(value)
                bits = value > rules[:, block]
        layouts[:, block] = bits
        return [bool(bit) for bit in bits.tolist()]

    state = model.hidden_states(tokens, choose)
    loss = _answer_loss(model, state, prompts.tolist(), answers, [len(r) + 1 for _, r in jobs])
    keep = torch.ones(len(owners), dtype=torch.bool)
    first = 0
    for _, job_rules in jobs:
        keep[first] = False
        first += len(job_rules) + 1
    return Measurement(
        torch.tensor(owners)[keep],
        layouts[keep],
        loss[keep],
        torch.stack(features, dim=1)[keep.to(device)] if features else None,
        torch.stack(utilities, dim=1)[keep] if utilities else None,
    )


def _answer_loss(
    model: MorphModel, state: torch.Tensor, prompts: list[int], answers: list[int], sizes: list[int]
) -> torch.Tensor:
    """KL(base || row), mean over the answer's tokens, float32 `[rows]`; the first row of each job is the base."""
    weight = (model.embedding.weight if model.head is None else model.head.weight).float()
    losses, first = [], 0
    for size in sizes:
        begin, end = prompts[first] - 1, prompts[first] + answers[first] - 1
        # The head runs in float32: bfloat16 logits would round by more than a small KL.
        logits = state[first : first + size, begin:end].float() @ weight.T
        log_probs = logits.log_softmax(-1)
        base = log_probs[0]
        losses.append((base.exp() * (base - log_probs)).sum(-1).mean(-1))
        first += size
    return torch.cat(losses).cpu()
