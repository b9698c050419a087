"""Tokens drawn on the device: the candidates and the counter RNG of `morph.engine.sampling`, rows all at once.

Random numbers depend on (seed, position) alone, so the host makes them ahead and they travel with the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True, eq=False)
class Draws:
    """How each row's token is drawn, float32 `[rows]` but for `top_k` int64 and `uniform` float64.

    temperature 0 = the likeliest token; top_k 0 = all; top_p 1 = all; min_p 0 = all; uniform in [0, 1).
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor

    @classmethod
    def of(cls, rows: list[tuple[float, int, float, float, float]], device: torch.device) -> Draws:
        """From (temperature, top_k, top_p, min_p, uniform) per row, in one copy to the device."""
        packed = torch.tensor(rows, dtype=torch.float64).to(device)
        temperature, top_k, top_p, min_p, uniform = packed.unbind(1)
        return cls(temperature.float(), top_k.long(), top_p, min_p.float(), uniform)


def draw_tokens(logits: torch.Tensor, draws: Draws, sort: bool) -> torch.Tensor:
    """One token per row, int64 `[rows]`; -1 where the largest logit is not finite. Nothing waits for the host.

    Temperature, then top-k, top-p, min-p, then inverse CDF. With `sort` candidates are in descending order (equal ones
    by id) in every row that limits top-k or top-p, else in the vocabulary's, as on the host.

    Args:
        logits: float32 `[rows, vocab]`, adjusted; not changed.
        sort: some row limits top-k or top-p.
    """
    vocab = logits.shape[1]
    best, likeliest = logits.max(dim=-1)
    finite = torch.isfinite(best)
    weights = torch.exp((logits - best[:, None]) / draws.temperature.clamp_min(LEAST_TEMPERATURE)[:, None])
    ids = None
    if sort:
        ordered = (draws.top_k > 0) & (draws.top_k < vocab) | (draws.top_p < 1.0)
        by_size = torch.sort(logits, dim=-1, descending=True, stable=True).indices
        ids = torch.where(ordered[:, None], by_size, torch.arange(vocab, device=logits.device))
        weights = weights.gather(1, ids)
        rank = torch.arange(vocab, device=logits.device)
        limit = torch.where((draws.top_k > 0) & ordered, draws.top_k, vocab)
        weights = torch.where(rank < limit[:, None], weights, 0.0)
        mass = weights.double()
        before = mass.cumsum(-1) - mass
        kept = (before < draws.top_p[:, None].double() * mass.sum(-1, keepdim=True)) | (draws.top_p >= 1.0)[:, None]
        weights = torch.where(kept, weights, 0.0)
    weights = torch.where(weights >= draws.min_p[:, None] * weights.amax(-1, keepdim=True), weights, 0.0)
    cdf = weights.double().cumsum(-1)
    total = cdf[:, -1:].contiguous()
    at = torch.searchsorted(cdf, draws.uniform[:, None] * total, right=True)
    # u · total can round up to the total; the last token that has any mass is the limit.
    at = torch.minimum(at, torch.searchsorted(cdf, total))
    tokens = (at if ids is None else ids.gather(1, at)).squeeze(1)
    tokens = torch.where(draws.temperature > 0, tokens, likeliest)
    return torch.where(finite, tokens, -1)
