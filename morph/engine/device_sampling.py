"""Sampling where the logits are: the host gets token ids, once per step."""

from __future__ import annotations

import torch

from morph.engine.request import Request
from morph.engine.sampling import adjust_, token_logprob, uniform
from morph.kernels.cuda.sampling import Draws, draw_tokens


def sample_on_device(logits: torch.Tensor, requests: list[Request]) -> list[int | None]:
    """As `morph.engine.sampling.sample`, with one transfer for all rows (and one more per row that wants logprobs)."""
    raw = {
        row: torch.log_softmax(logits[row], dim=-1)
        for row, request in enumerate(requests)
        if request.params.logprobs is not None
    }
    broken = None
    if any(request.penalised for request in requests):
        # Judged before penalties, which turn infinite logits into finite ones.
        broken = ~torch.isfinite(logits.max(dim=-1).values)
        for row, request in enumerate(requests):
            if request.penalised:
                adjust_(logits[row], request)
    if any(request.params.temperature > 0 for request in requests):
        params = [request.params for request in requests]
        rows = [
            (p.temperature, p.top_k, p.top_p, p.min_p, uniform(request.seed, request.num_tokens))
            for p, request in zip(params, requests, strict=True)
        ]
        limits = any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0) for p in params)
        found = draw_tokens(logits, Draws.of(rows, logits.device), sort=limits)
    else:
        best, found = logits.max(dim=-1)
        found = torch.where(torch.isfinite(best), found, -1)
    if broken is not None:
        found = torch.where(broken, -1, found)
    tokens: list[int | None] = [token if token >= 0 else None for token in found.tolist()]
    for row, logprobs in raw.items():
        token = tokens[row]
        if token is not None:
            requests[row].logprobs.append(token_logprob(logprobs, token, requests[row].params.logprobs or 0))
    return tokens
