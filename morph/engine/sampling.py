"""From logits to tokens. What is drawn for a request depends on its own logits, seed and position alone."""

from __future__ import annotations

import numpy as np
import torch

from morph.engine.params import TokenLogprob
from morph.engine.request import Request


def uniform(seed: int, position: int) -> float:
    """Counter RNG: a number in [0, 1) from (seed, position), Philox-4x64-10 (Salmon et al., 2011)."""
    bits = np.random.Philox(key=seed % 2**64, counter=position).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def adjust_(logits: torch.Tensor, request: Request) -> None:
    """Apply bias and penalties in place.

    Args:
        logits: float32 `[vocab]` of one request.
    """
    params = request.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), dtype=torch.long, device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(sorted(set(request.tokens)), dtype=torch.long, device=logits.device)
        values = logits[ids]
        penalty = params.repetition_penalty
        logits[ids] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty or params.frequency_penalty) and request.counts:
        ids = torch.tensor(list(request.counts), dtype=torch.long, device=logits.device)
        counts = torch.tensor(list(request.counts.values()), dtype=torch.float32, device=logits.device)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts


def draw(logits: torch.Tensor, request: Request) -> int:
    """Sample one token: temperature, then top-k, top-p, min-p, then inverse-CDF with the counter RNG.

    Args:
        logits: float32 `[vocab]`, adjusted.
    """
    params = request.params
    u = uniform(request.seed, request.num_tokens)
    values, ids = logits, None
    if 0 < params.top_k < logits.numel():
        values, ids = torch.topk(logits, params.top_k)
    elif params.top_p < 1.0:
        values, ids = torch.sort(logits, descending=True, stable=True)
    probs = torch.softmax(values.double() / params.temperature, dim=-1)
    if params.top_p < 1.0:
        mass_before = probs.cumsum(-1) - probs
        probs = torch.where(mass_before < params.top_p, probs, 0.0)
    if params.min_p > 0.0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    cdf = probs.cumsum(-1)
    index = int(torch.searchsorted(cdf, u * cdf[-1], right=True))
    # u * total can round up to the total; take the last token that has any mass.
    index = min(index, int(torch.nonzero(probs)[-1]))
    return index if ids is None else int(ids[index])


def token_logprob(logprobs: torch.Tensor, token: int, alternatives: int) -> TokenLogprob:
    """The token's log probability and the likeliest `alternatives`.

    Args:
        logprobs: float32 `[vocab]`.
    """
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        values, ids = torch.topk(logprobs, min(alternatives, logprobs.numel()))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)


def sample(logits: torch.Tensor, requests: list[Request]) -> list[int | None]:
    """One token per request; records log probabilities on requests that ask for them.

    Args:
        logits: float32 `[requests, vocab]`, row i belongs to `requests[i]`; may be changed.

    Returns:
        Token ids; None for a row whose logits are not finite (broken weights or memory), which is that
        request's error and nobody else's.
    """
    best_values, best = logits.max(dim=-1)
    finite = torch.isfinite(best_values).tolist()
    tokens: list[int | None] = list(best.tolist())
    for row, request in enumerate(requests):
        if not finite[row]:
            tokens[row] = None
            continue
        params = request.params
        raw = None
        if params.logprobs is not None:
            raw = torch.log_softmax(logits[row], dim=-1)
        penalised = (
            params.logit_bias
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
        )
        if penalised:
            adjust_(logits[row], request)
            tokens[row] = int(logits[row].argmax())
        token = draw(logits[row], request) if params.temperature > 0 else tokens[row]
        assert token is not None
        tokens[row] = token
        if raw is not None:
            request.logprobs.append(token_logprob(raw, token, params.logprobs or 0))
    return tokens
