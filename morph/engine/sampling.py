"""From logits to tokens. What is drawn for a request depends on its own logits, seed and position alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from morph.engine.params import TokenLogprob
from morph.engine.request import Request

Floats = npt.NDArray[np.float32]

LEAST_TEMPERATURE = 1e-6
"""Colder than this, float32 logits that differ at all differ by more than the whole range of exp."""
LARGEST = float(np.finfo(np.float32).max)


def uniform(seed: int, position: int) -> float:
    """Counter RNG: a number in [0, 1) from (seed, position), Philox-4x64-10 (Salmon et al., 2011)."""
    bits = np.random.Philox(key=seed % 2**64, counter=position).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def adjust_(logits: torch.Tensor, request: Request) -> None:
    """Apply bias, penalties and the grammar in place.

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
        # A penalty near 0 overflows; infinite logits have no differences to draw by.
        logits[ids] = torch.where(values > 0, values / penalty, values * penalty).clamp(-LARGEST, LARGEST)
    if (params.presence_penalty or params.frequency_penalty) and request.counts:
        ids = torch.tensor(list(request.counts), dtype=torch.long, device=logits.device)
        counts = torch.tensor(list(request.counts.values()), dtype=torch.float32, device=logits.device)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if request.constraint is not None:
        request.constraint.mask_(logits)


def draw(logits: Floats, request: Request) -> int:
    """Sample one token: temperature, then top-k, top-p, min-p, then inverse-CDF with the counter RNG.

    Candidates are in descending order under top-k or top-p (equal ones by id), else in the vocabulary's.

    Args:
        logits: float32 `[vocab]`, adjusted, the largest finite.
    """
    params = request.params
    values, ids = logits, None
    if 0 < params.top_k < logits.size:
        ids = np.flatnonzero(logits >= np.partition(logits, -params.top_k)[-params.top_k])
        ids = ids[np.argsort(-logits[ids], kind="stable")][: params.top_k]
        values = logits[ids]
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((values - values.max()) / max(params.temperature, LEAST_TEMPERATURE))
    if params.top_p < 1.0:
        mass = weights.sum(dtype=np.float64)
        if ids is None:
            # Tokens below this weigh together less than half of what top-p leaves out, so none of them is in; the
            # others are few, and sorting the whole vocabulary would take longer than a decode step.
            ids = np.flatnonzero(weights >= 0.5 * (1.0 - params.top_p) * mass / weights.size)
            ids = ids[np.argsort(-weights[ids], kind="stable")]
            weights = weights[ids]
        before = weights.cumsum(dtype=np.float64) - weights
        weights = weights[before < params.top_p * mass]
    if params.min_p > 0.0:
        weights = np.where(weights >= params.min_p * weights.max(), weights, 0)
    cdf = weights.cumsum(dtype=np.float64)
    # u * total can round up to the total; the clip takes the last token that has any mass.
    u = uniform(request.seed, request.num_tokens)
    index = min(int(cdf.searchsorted(u * cdf[-1], side="right")), int(cdf.searchsorted(cdf[-1])))
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
    tokens = _argmax(logits)
    for row, request in enumerate(requests):
        token = tokens[row]
        if token is None or request.plain_greedy:
            continue
        params = request.params
        raw = None
        if params.logprobs is not None:
            raw = torch.log_softmax(logits[row], dim=-1)
        if request.penalised:
            adjust_(logits[row], request)
            token = int(logits[row].argmax())
        if params.temperature > 0:
            token = draw(logits[row].cpu().numpy(), request)
        tokens[row] = token
        if raw is not None:
            request.logprobs.append(token_logprob(raw, token, params.logprobs or 0))
    return tokens


def _argmax(logits: torch.Tensor) -> list[int | None]:
    """Likeliest token of each row (the first of equal ones), None where the largest logit is not finite."""
    if logits.device.type == "cpu":
        # numpy's is vectorised: 6 µs for a row of 49152, where torch's takes 40 to 200.
        array = logits.numpy()
        best = array.argmax(axis=1)
        finite = np.isfinite(array[np.arange(len(best)), best])
        return [int(token) if ok else None for token, ok in zip(best, finite, strict=True)]
    values, ids = logits.max(dim=-1)
    return [token if ok else None for token, ok in zip(ids.tolist(), torch.isfinite(values).tolist(), strict=True)]
