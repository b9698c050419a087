"""From finished items to figures: quality, agreement, spending and FLOPs of each layout on each set, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from morph.config import ModelConfig
from morph.evaluate.compare import agreement, compare_pairs, compare_with_base, metric_of, ordered
from morph.evaluate.flops import decode_flops, prefill_flops, request_flops
from morph.evaluate.layouts import undecided
from morph.evaluate.metrics import Estimate, bootstrap, choice_kl, paired
from morph.evaluate.plan import Evaluation, Part
from morph.evaluate.store import Record
from morph.gate.calibrate import budget_of
from morph.gate.evaluate import oracle_at
from morph.layout import Layout

Array = npt.NDArray[np.float64]

SUMMARY_VERSION = 1
"""Of the layout of results.json; raised when a reader of older files would miss something."""

DISCRIMINATES = 0.02
"""Base minus all-ssm below which a set says nothing about layouts by its own metric; agreement judges then."""

REFERENCE_LENGTHS = (1024, 2048, 4096, 8192)


def bits_of(records: Sequence[Record]) -> torch.Tensor:
    """Layouts as bool `[items, blocks]`."""
    return torch.tensor([[char == "1" for char in record["layout"]] for record in records])


def tokens_of(records: Sequence[Record]) -> list[tuple[int, int]]:
    """Prompt and answer tokens of each item, whole."""
    return [(record["prompt_tokens"], max(1, round(record["answer_tokens"]))) for record in records]


def mean_tflops(config: ModelConfig, records: Sequence[Record]) -> float:
    """10¹² operations per token over the items at their own lengths: all operations over all tokens."""
    operations = tokens = 0.0
    for record, (prompt, answer) in zip(records, tokens_of(records), strict=True):
        layout = [char == "1" for char in record["layout"]]
        operations += request_flops(config, layout, prompt, answer).total
        tokens += prompt + answer
    return operations / tokens / 1e12


def tflops_at(config: ModelConfig, layouts: torch.Tensor, length: int, answer: int) -> float:
    """The same with every prompt `length` tokens long."""
    counts = Counter(map(tuple, layouts.tolist()))
    total = sum(request_flops(config, list(bits), length, answer).total * n for bits, n in counts.items())
    return total / len(layouts) / (length + answer) / 1e12


def layout_statistics(layouts: torch.Tensor) -> dict[str, Any]:
    """How many different layouts, how much the commonest six cover, and the blocks' attention rates."""
    counts = Counter(str(Layout.from_bits(row)) for row in layouts.tolist())
    common = counts.most_common(6)
    return {
        "distinct": len(counts),
        "top6_share": round(sum(n for _, n in common) / len(layouts), 4),
        "commonest": [{"layout": text, "count": n} for text, n in common],
        "attention_counts": dict(sorted(Counter(layouts.sum(1).tolist()).items())),
        "block_rates": [round(float(rate), 4) for rate in layouts.double().mean(0)],
    }


def summarise_layout(
    part: Part, config: ModelConfig, records: Sequence[Record], base: Sequence[Record], base_tflops: float
) -> dict[str, Any]:
    """Figures of one layout on one set; `base` are the same items under all attention."""
    count = len(records)
    layouts, saved = bits_of(records), part.requests.saved[:count]
    free = undecided(config, saved)
    same = agreement(part, records, base)
    tflops = mean_tflops(config, records)
    entry: dict[str, Any] = {
        "items": count,
        "metrics": {
            name: bootstrap([r["metrics"][name] for r in records]).to_dict(100) for name in part.dataset.metrics
        },
        "agreement": bootstrap(same).to_dict(100),
        "attention_share": round(float(layouts.double().mean()), 4),
        "attention_blocks": round(float(layouts.sum(1).double().mean()), 3),
        "budget": round(budget_of(layouts, saved), 4) if bool(free.any()) else None,
        "tflops_per_token": tflops,
        "flops_saved": round(1 - tflops / base_tflops, 4),
        "layouts": layout_statistics(layouts),
    }
    primary = part.dataset.primary
    ours, theirs = metric_of(records, primary), metric_of(base, primary)
    entry["vs_base"] = paired(ours, theirs).to_dict(100)
    if part.dataset.scored:
        kl = [choice_kl(b["logprobs"], a["logprobs"]) for a, b in zip(records, base, strict=True)]
        entry["choice_kl"] = bootstrap(kl).to_dict(1.0, 5)
    if not part.dataset.scored and all("answer_logprob" in r for r in (*records, *base)):
        # Of the base's own tokens: an estimate of KL(base || layout) at greedy decoding.
        gaps = [b["answer_logprob"] - a["answer_logprob"] for a, b in zip(records, base, strict=True)]
        entry["answer_loss"] = bootstrap(gaps).to_dict(1.0, 5)
    if bool(free.any()):
        answer = max(1, round(float(np.mean([a for _, a in tokens_of(records)]))))
        chosen = layouts[free]
        everything = torch.ones_like(chosen[:1])
        entry["flops_saved_at"] = {
            str(n): round(
                1 - tflops_at(config, chosen, n - answer, answer) / tflops_at(config, everything, n - answer, answer),
                4,
            )
            for n in REFERENCE_LENGTHS
            if n <= config.max_context and n > answer
        }
    return entry


def summarise_set(part: Part, evaluation: Evaluation) -> dict[str, Any]:
    """Figures of one set under every layout."""
    found = evaluation.records[part.dataset.name]
    base = ordered(part, found["attention"])
    base_tflops = mean_tflops(evaluation.config, base)
    lengths = np.array(part.requests.lengths)
    free = undecided(evaluation.config, part.requests.saved)
    entry: dict[str, Any] = {
        "kind": part.dataset.kind,
        "primary": part.dataset.primary,
        "metrics": list(part.dataset.metrics),
        "items": len(part.items),
        "left_out": evaluation.left_out.get(part.dataset.name, 0),
        "prompt_tokens": {
            "mean": round(float(lengths.mean()), 1),
            "min": int(lengths.min()),
            "max": int(lengths.max()),
        },
        "answer_tokens": round(float(np.mean([r["answer_tokens"] for r in base])), 1),
        "all_attention_at_every_budget": int((~free).sum()),
        "layouts": {},
    }
    for name, records in found.items():
        ours = ordered(part, records)
        same = ordered(part, {r["id"]: found["attention"][r["id"]] for r in ours})
        entry["layouts"][name] = summarise_layout(part, evaluation.config, ours, same, base_tflops)
    if "ssm" in found:
        lost = (
            metric_of(base, part.dataset.primary).mean()
            - metric_of(ordered(part, found["ssm"]), part.dataset.primary).mean()
        )
        entry["discriminates"] = bool(lost >= DISCRIMINATES)
        entry["judged_by"] = part.dataset.primary if entry["discriminates"] else "agreement"
    else:
        entry["discriminates"], entry["judged_by"] = None, part.dataset.primary
    oracle = _oracle(part, evaluation)
    if oracle:
        entry["oracle"] = oracle
    return entry


def _oracle(part: Part, evaluation: Evaluation) -> dict[str, Any]:
    """What knowing each item's result under the static chain would give at the spending of each `auto`."""
    found = evaluation.records[part.dataset.name]
    chain = [name for name in found if name.startswith("chain:")]
    count = evaluation.oracle_items
    if not chain or not count:
        return {}
    rows = min(count, len(part.items))
    saved = part.requests.saved[:rows].double()
    if not bool((saved > 0).any()):
        return {}
    losses = np.stack([1 - metric_of(ordered(part, found[name])[:rows], part.dataset.primary) for name in chain], 1)
    spent = torch.stack([(saved * bits_of(ordered(part, found[name])[:rows])).sum(1) for name in chain], 1).numpy()
    out: dict[str, Any] = {"items": rows, "chain": chain}
    for name in found:
        if name.startswith("auto:"):
            own = (saved * bits_of(ordered(part, found[name])[:rows])).sum(1).numpy()
            statistic = oracle_at(losses, spent, own)
            out[name] = {
                "oracle": round(100 * (1 - statistic(np.arange(rows))), 3),
                "auto": round(
                    100 * float(metric_of(ordered(part, found[name])[:rows], part.dataset.primary).mean()), 3
                ),
            }
    return out


def flops_table(config: ModelConfig) -> dict[str, Any]:
    """10⁹ operations per token of prefill and decode at some lengths, by part, for both mixers everywhere."""
    table: dict[str, Any] = {}
    for name, bit in (("attention", True), ("ssm", False)):
        layout = [bit if kind == "adaptive" else kind == "attention" for kind in config.block_kinds]
        rows = {}
        for n in REFERENCE_LENGTHS:
            if n > config.max_context:
                continue
            forms = {"prefill": prefill_flops(config, layout, n)}
            if not all(layout):
                forms["prefill_recurrent"] = prefill_flops(config, layout, n, "recurrent")
            row = {
                key: {p: round(getattr(f, p) / n / 1e9, 5) for p in ("mixer", "mlp", "head", "total")}
                for key, f in forms.items()
            }
            step = decode_flops(config, layout, n)
            row["decode"] = {p: round(getattr(step, p) / 1e9, 5) for p in ("mixer", "mlp", "head", "total")}
            rows[str(n)] = row
        table[name] = rows
    return table


def by_kind(evaluation: Evaluation, sets: dict[str, Any]) -> dict[str, Any]:
    """What each kind of request is given under each `auto`: mean share of blocks and of the cost, undecided ones."""
    out: dict[str, Any] = {}
    for name in (spec.name for spec in evaluation.specs if spec.kind == "auto"):
        groups: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for part in evaluation.parts:
            records = ordered(part, evaluation.records[part.dataset.name][name])
            keep = undecided(evaluation.config, part.requests.saved)
            if bool(keep.any()):
                groups.setdefault(part.dataset.kind, []).append((bits_of(records)[keep], part.requests.saved[keep]))
        out[name] = {}
        for kind, pieces in groups.items():
            layouts, saved = (torch.cat(list(x)) for x in zip(*pieces, strict=True))
            out[name][kind] = {
                "requests": len(layouts),
                "attention_share": round(float(layouts.double().mean()), 4),
                "budget": round(budget_of(layouts, saved), 4),
            }
    return out


def scores(evaluation: Evaluation, draws: int = 2000) -> dict[str, Any]:
    """Mean over sets of the primary metric, by layout, with an interval over items within each set."""
    out: dict[str, Any] = {}
    for spec in evaluation.specs:
        if spec.kind == "chain":
            continue  # on a subset of the items
        rng = np.random.default_rng(0)
        values = [
            metric_of(ordered(part, evaluation.records[part.dataset.name][spec.name]), part.dataset.primary)
            for part in evaluation.parts
        ]
        means = np.mean([v[rng.integers(0, len(v), (draws, len(v)))].mean(1) for v in values], axis=0)
        low, high = np.quantile(means, [0.025, 0.975])
        out[spec.name] = Estimate(float(np.mean([v.mean() for v in values])), float(low), float(high)).to_dict(100)
    return out


def summarise(evaluation: Evaluation) -> dict[str, Any]:
    """All figures of an evaluation, plain JSON types."""
    sets = {part.dataset.name: summarise_set(part, evaluation) for part in evaluation.parts}
    autos = [spec.name for spec in evaluation.specs if spec.kind == "auto"]
    ssm = any(spec.kind == "ssm" for spec in evaluation.specs)
    against_static = compare_pairs(evaluation, sets, "auto", "static")
    return {
        "version": SUMMARY_VERSION,
        "about": evaluation.about,
        "layouts": [spec.name for spec in evaluation.specs],
        "ranking": evaluation.ranking,
        "scores": scores(evaluation),
        "sets": sets,
        "not_inferior": {name: compare_with_base(evaluation, sets, name) for name in autos} if ssm else {},
        "auto_vs_static": against_static,
        "auto_vs_shuffled": compare_pairs(evaluation, sets, "auto", "shuffled"),
        "by_kind": by_kind(evaluation, sets),
        "flops": flops_table(evaluation.config),
        "blocks": evaluation.config.num_blocks,
        "notes": {
            "unit": "metrics and differences in points of 100, with 95 % bootstrap intervals over items",
            "agreement": "choices: the same as all attention's; written answers: F1 of the words of both",
            "discriminates": "base - all-ssm >= 2 points; other sets are judged by agreement",
            "static": "nested by the ranking, at the realised cost of auto of the same budget, set by set; attention "
            "where it is cheaper, as the gates take it",
            "budget": "realised: (cost - cheapest) / (all attention - cheapest) of the set's requests, by the model's "
            "cost table; none where no request has a choice",
            "tflops": "prefill in chunk form, causal attention; all operations over prompt and answer tokens",
        },
    }
