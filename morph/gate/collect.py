"""Measures what a layout costs a request (KL of the base to it over the base's answer) and what the gates see of it.

A row of work is one request under one rule. A rule is a threshold per block: attention iff û exceeds it. ±inf fixes a
block, so fixed layouts and gated ones run in the same batch, block by block, as they do in the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from morph.config import ModelConfig
from morph.gate.answers import Requests
from morph.model.model import MorphModel
from morph.train.trunk import Trunk

Utility = Callable[[int, torch.Tensor], torch.Tensor]
"""û of a block from features float32 `[rows, 2 * hidden + 1]`; float32 `[rows]`."""


def trunk_of(model: MorphModel) -> Trunk:
    """The model in the form that is fast for whole sequences, compiled on CUDA; made once per model."""
    # Kept on the model, which it refers to: both go at the same time.
    kept = vars(model)
    if "_trunk" not in kept:
        kept["_trunk"] = Trunk(model, compiled=model.embedding.weight.is_cuda, teacher=False)
    trunk: Trunk = kept["_trunk"]
    return trunk


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


def force_rules(rules: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Thresholds `[..., blocks]` with those of static blocks set to the mixer that they have; a copy."""
    forced = rules.clone()
    for block, kind in enumerate(config.block_kinds):
        if kind != "adaptive":
            forced[..., block] = -torch.inf if kind == "attention" else torch.inf
    return forced


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
    losses: bool = True,
) -> Measurement:
    """Run jobs and compare with the base.

    Args:
        jobs: request index and rules float32 `[rules, blocks]`; jobs of one request are best given together.
        utility: the gates, needed where a rule is finite.
        batch_tokens: padded tokens of a batch, the base's row included.
        losses: False runs the prompts only, for the gates' choices; losses are nan then.

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
    for group in _pack(requests, jobs, batch_tokens):
        rows = torch.cat([torch.arange(int(starts[j]), int(starts[j + 1])) for j in group])
        part = _measure_batch(model, requests, [jobs[j] for j in group], utility, keep_features, losses)
        out.layouts[rows], out.loss[rows] = part.layouts, part.loss
        if out.features is not None and part.features is not None:
            out.features[rows.to(device)] = part.features
        if out.utilities is not None and part.utilities is not None:
            out.utilities[rows] = part.utilities
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
    losses: bool,
) -> Measurement:
    device, blocks = model.embedding.weight.device, model.config.num_blocks
    base = fixed_rules(torch.ones(int(losses), blocks, dtype=torch.bool))
    sizes = [len(rules) + len(base) for _, rules in jobs]
    rules = torch.cat([torch.cat([base, job_rules]) for _, job_rules in jobs])
    gated = bool(torch.isfinite(rules).any())
    owner = torch.repeat_interleave(torch.arange(len(jobs)), torch.tensor(sizes))
    lengths = [len(requests.prompts[request]) for request, _ in jobs]
    sequences = [requests.prompts[r] + (requests.answers[r] if losses else []) for r, _ in jobs]
    longest = max(map(len, sequences))
    tokens = torch.zeros(len(jobs), longest, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
    prompts = torch.tensor(lengths, device=device)
    share = (torch.arange(longest, device=device)[None, :] < prompts[:, None]).float() / prompts[:, None]

    layouts = torch.empty(len(owner), blocks, dtype=torch.bool)
    features: list[torch.Tensor] = []
    utilities: list[torch.Tensor] = []
    # Rows that agree so far share one hidden state: `state_of` says which, `job_of` whose prompt a state belongs to.
    state_of, job_of = owner, torch.arange(len(jobs))
    trunk = trunk_of(model)
    rope = trunk.rope(longest)
    hidden, normed = trunk.embed(tokens.to(device))
    for number in range(blocks):
        bits = rules[:, number] < 0
        if keep_features or gated:
            jobs_here = job_of.to(device)
            mean = torch.bmm(share[jobs_here][:, None], normed.float()).squeeze(1)
            last = normed[torch.arange(len(job_of), device=device), prompts[jobs_here] - 1].float()
            seen = torch.cat([mean, last], dim=1)
            if keep_features:
                features.append(seen.half()[state_of.to(device)])
            if gated:
                assert utility is not None, "rules with finite thresholds need gates"
                value = utility(number, with_log_length(seen, prompts[jobs_here])).cpu()[state_of]
                utilities.append(value)
                bits = value > rules[:, number]
        layouts[:, number] = bits
        branches, state_of = torch.unique(torch.where(bits, 0, len(job_of)) + state_of, return_inverse=True)
        yes = branches[branches < len(job_of)]
        no = branches[branches >= len(job_of)] - len(job_of)
        source = torch.cat([yes, no])
        job_of = job_of[source]
        # A state may be in both parts: what follows from one prefix under two layouts is computed from there on only.
        paths = ((trunk.attention, yes), (trunk.ssm, no))
        mixed = torch.cat([mix(number, normed[part.to(device)], rope) for mix, part in paths if len(part)])
        hidden, normed = trunk.finish(number, hidden[source.to(device)], mixed)

    loss = torch.full((len(owner),), math.nan)
    keep = torch.ones(len(owner), dtype=torch.bool)
    if losses:
        loss = _answer_loss(trunk, normed, state_of, [requests.answers[r] for r, _ in jobs], lengths, sizes)
        keep[torch.tensor([0, *sizes[:-1]]).cumsum(0)] = False
    return Measurement(
        torch.tensor([jobs[j][0] for j in owner.tolist()])[keep],
        layouts[keep],
        loss[keep],
        torch.stack(features, dim=1)[keep.to(device)] if features else None,
        torch.stack(utilities, dim=1)[keep] if utilities else None,
    )


def _answer_loss(
    trunk: Trunk,
    normed: torch.Tensor,
    state_of: torch.Tensor,
    answers: list[list[int]],
    lengths: list[int],
    sizes: list[int],
) -> torch.Tensor:
    """KL(base || row), mean over the answer's tokens, float32 `[rows]`; the first row of each job is the base."""
    # The head runs in float32: bfloat16 logits would round by more than a small KL.
    weight = trunk.head.float()
    results, first = [], 0
    for answer, length, size in zip(answers, lengths, sizes, strict=True):
        states = state_of[first : first + size].to(normed.device)
        state = normed[states, length - 1 : length + len(answer) - 1]
        log_probs = (state.float() @ weight.T).log_softmax(-1)
        base = log_probs[:1]
        results.append((base.exp() * (base - log_probs)).sum(-1).mean(-1))
        first += size
    return torch.cat(results).cpu()
