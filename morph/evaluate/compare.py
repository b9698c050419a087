"""One layout against another on the same items: what is compared, and when it counts as as good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from morph.evaluate.layouts import undecided
from morph.evaluate.metrics import Estimate, choose, paired, token_f1
from morph.evaluate.plan import Evaluation, Part
from morph.evaluate.store import Record

Array = npt.NDArray[np.float64]

MARGIN = 0.01
"""Of non-inferiority: the paired 95 % lower bound may be at most this far below the base."""


def agreement(part: Part, ours: Sequence[Record], base: Sequence[Record]) -> Array:
    """Per item, 0…1: the same choice as the base by the set's primary metric, or the F1 of both answers' words."""
    if part.dataset.scored:
        lengths = [
            [len(c) for c in item.choices] if part.dataset.primary == "acc_norm" else None for item in part.items
        ]
        return np.array(
            [
                float(choose(a["logprobs"], n) == choose(b["logprobs"], n))
                for a, b, n in zip(ours, base, lengths, strict=False)
            ]
        )
    return np.array([token_f1(a["answer"], b["answer"]) for a, b in zip(ours, base, strict=True)])


def metric_of(records: Sequence[Record], name: str) -> Array:
    """A metric of each record, 0…1."""
    return np.array([record["metrics"][name] for record in records])


def ordered(part: Part, found: dict[str, Record]) -> list[Record]:
    """Records in the order of the set's items, as far as there are any."""
    return [found[item.id] for item in part.items if item.id in found]


def judged(part: Part, evaluation: Evaluation, layout: str, by: str) -> Array:
    """Per undecided item, what a comparison looks at: the primary metric or agreement with the base."""
    found = evaluation.records[part.dataset.name]
    ours, base = ordered(part, found[layout]), ordered(part, found["attention"])
    values = agreement(part, ours, base) if by == "agreement" else metric_of(ours, part.dataset.primary)
    keep = undecided(evaluation.config, part.requests.saved).numpy()
    return np.asarray(values[keep], dtype=np.float64)


def compare_with_base(evaluation: Evaluation, sets: dict[str, Any], layout: str) -> dict[str, Any]:
    """Is `layout` not inferior to the base, per set with undecided requests.

    A set that discriminates: paired 95 % lower bound of the difference >= -1 point. Another one is judged by
    agreement: significantly closer to the base than all-ssm is.
    """
    rows: dict[str, Any] = {}
    for part in evaluation.parts:
        entry = sets[part.dataset.name]
        if layout not in entry["layouts"] or entry["all_attention_at_every_budget"] == entry["items"]:
            continue
        by = entry["judged_by"]
        ours = judged(part, evaluation, layout, by)
        if by == "agreement":
            difference = paired(ours, judged(part, evaluation, "ssm", by))
            good = difference.low > 0
        else:
            difference = paired(ours, judged(part, evaluation, "attention", by))
            good = difference.low >= -MARGIN
        rows[part.dataset.name] = {
            "judged_by": by,
            "against": "ssm" if by == "agreement" else "attention",
            "difference": difference.to_dict(100),
            "not_inferior": bool(good),
        }
    return {"sets": rows, "not_inferior": sum(r["not_inferior"] for r in rows.values()), "of": len(rows)}


def compare_pairs(evaluation: Evaluation, sets: dict[str, Any], ours: str, theirs: str) -> list[dict[str, Any]]:
    """`ours:b` against `theirs:b` at equal realised cost, per set and budget."""
    pairs = []
    for part in evaluation.parts:
        entry = sets[part.dataset.name]
        if entry["all_attention_at_every_budget"] == entry["items"]:
            continue
        for name in entry["layouts"]:
            kind, _, budget = name.partition(":")
            other = f"{theirs}:{budget}"
            if kind != ours or other not in entry["layouts"]:
                continue
            by = entry["judged_by"]
            difference: Estimate = paired(judged(part, evaluation, name, by), judged(part, evaluation, other, by))
            pairs.append(
                {
                    "set": part.dataset.name,
                    "budget": float(budget),
                    "judged_by": by,
                    "realised": [entry["layouts"][name]["budget"], entry["layouts"][other]["budget"]],
                    "difference": difference.to_dict(100),
                    "at_least_as_good": bool(difference.value >= 0),
                    "significant": bool(difference.low > 0 or difference.high < 0),
                }
            )
    return pairs
