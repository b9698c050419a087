"""What a fit says about its gates: û by kind of prompt, and the small files that are kept of the features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from morph.gate.answers import Requests
from morph.gate.calibrate import rules_of, saved_matrix
from morph.gate.cost import CostTable
from morph.gate.fit import FeatureRows, principal_features
from morph.gate.measured import Fitted

SHOWN_BUDGETS = (0.25, 0.5, 0.75)

LIGHT_BYTES = 15 << 20
"""Most bytes of a file of kept features."""


def kinds_summary(
    requests: Requests,
    ids: Sequence[int],
    predicted: torch.Tensor,
    cost: CostTable,
    budgets: Sequence[float],
    tau: Sequence[float],
) -> dict[str, Any]:
    """Per kind of prompt: how many, mean length, mean û per block, mean attention blocks at some budgets.

    Args:
        predicted: û of the requests `ids` by gates that did not see them, `[requests, blocks]`.
    """
    kinds = [requests.kinds[i] for i in ids]
    lengths = [len(requests.prompts[i]) for i in ids]
    saved = saved_matrix(cost, lengths)
    bits = {b: predicted > rules_of(tau[list(budgets).index(b)], saved) for b in SHOWN_BUDGETS if b in budgets}
    summary = {}
    for kind in sorted(set(kinds)):
        rows = torch.tensor([i for i, own in enumerate(kinds) if own == kind])
        summary[kind] = {
            "requests": len(rows),
            "mean_tokens": round(sum(lengths[int(i)] for i in rows) / len(rows)),
            "utility": [round(float(u), 5) for u in predicted[rows].mean(0)],
            "attention_blocks": {str(b): round(float(m[rows].sum(1).float().mean()), 2) for b, m in bits.items()},
        }
    return summary


def light_features(fitted: Fitted) -> dict[str, dict[str, torch.Tensor]]:
    """Two contexts per request on the leading principal directions, in files of at most `LIGHT_BYTES` each."""
    rows = fitted.rows
    count, blocks = len(rows.probe), rows.features.shape[1]
    rank = max(2, min(96, LIGHT_BYTES // (2 * count * blocks)))
    first = torch.full((count,), len(rows.request)).scatter_reduce(
        0, rows.request, torch.arange(len(rows.request)), "amin"
    )
    index = torch.cat([first, rows.probe])
    chosen = FeatureRows(
        rows.features[index.to(rows.features.device)], rows.request[index], rows.log_length, torch.arange(count)
    )
    z, projection = principal_features(chosen, rank)
    ids = torch.tensor(fitted.ids)
    return {
        "features_0.safetensors": {"z": z[:count], "request": ids},
        "features_1.safetensors": {"z": z[count:], "request": ids},
        "projection.safetensors": projection,
    }
