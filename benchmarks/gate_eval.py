"""Gates of a model against shuffled masks, the best static layouts and an oracle over counts.

    python benchmarks/gate_eval.py MODEL --data DIR --json benchmarks/results/gates_r1.json

Requests come from evaluation sets that no gate was fitted on. The base answers each prompt; every layout's loss is
KL(base || model) per answer token. Needs the evaluation files in DIR/eval; slow without a GPU (try `--requests 20`).
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from morph.gate.answers import Requests, sample_answers
from morph.gate.calibrate import calibrate, rules_of, saved_matrix
from morph.gate.collect import fixed_rules, measure
from morph.gate.evaluate import (
    Array,
    bootstrap_ratio,
    mean_of,
    oracle_at,
    shuffle_within_buckets,
    static_at,
)
from morph.gate.fit import GateStack
from morph.gate.labels import nested_layouts
from morph.gate.policy import GateWeights, UtilityPolicy
from morph.gate.traffic import LETTERS, Prompt, json_lines, tokenize, user
from morph.model.model import MorphModel

CHAIN = (0, 1, 2, 3, 4, 6, 8, 10, 12, 15, 18, 20, 22, 25, 28, 30)
COUNTS = (4, 8, 15)
BUDGETS = (0.05, 0.1, 0.25, 0.5, 0.75)
SHUFFLES = 2


def evaluation_prompts(data: Path, per_set: int, seed: int = 0) -> list[Prompt]:
    """Prompts of the evaluation sets, `per_set` of each."""
    rng = random.Random(seed)

    def some(name: str) -> list[dict[str, Any]]:
        rows = list(json_lines(data / "eval" / f"{name}.jsonl.gz"))
        return rng.sample(rows, min(per_set, len(rows)))

    def choices(row: dict[str, Any]) -> str:
        lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=False)]
        return f"Question: {row['question']}\n" + "\n".join(lines) + "\nAnswer:"

    prompts = [user("arc", choices(row)) for row in some("arc_challenge/test")]
    prompts += [user("gsm8k", row["question"]) for row in some("gsm8k/test")]
    prompts += [user("squad", f"{r['context']}\n\nQuestion: {r['question']}") for r in some("squad_v1/dev")]
    prompts += [
        user("boolq", f"{r['context']}\n\nQuestion: {r['question']}?") for r in some("boolq/validation_passage")
    ]
    prompts += [user("scitldr", f"Summarize this text.\n\n{r['document']}") for r in some("scitldr/test")]
    prompts += [user("dialogsum", f"Summarize this conversation.\n\n{r['document']}") for r in some("dialogsum/test")]
    prompts += [Prompt("wikitext", text=r["text"][: rng.randrange(400, 14_000)]) for r in some("wikitext2/test")]
    documents = {r["doc_id"]: r["document"] for r in json_lines(data / "eval/qmsum/test_docs.jsonl.gz")}
    for row in some("qmsum/test_queries"):
        prompts.append(user("qmsum", f"{documents[row['doc_id']][: rng.randrange(3000, 13_000)]}\n\n{row['query']}"))
    for row in some("kv_retrieval/kv75"):
        pairs = list(json.loads(row["context"]).items())
        kept = dict(rng.sample(pairs, rng.randrange(4, 50)))
        key = rng.choice(list(kept))
        prompts.append(user("kv75", f'{json.dumps(kept)}\n\nWhat is the value of the key "{key}"?'))
    shots = list(json_lines(data / "eval/mmlu/dev.jsonl.gz"))
    for row in some("mmlu/test"):
        examples = [f"{choices(r)} {LETTERS[r['answer']]}" for r in rng.sample(shots, rng.randrange(1, 24))]
        prompts.append(user("mmlu", "\n\n".join([*examples, choices(row)])))
    return prompts


@dataclass
class Table:
    """Measured losses of some requests.

    Attributes:
        chain: `[requests, len(CHAIN)]`, static layouts by count. gated, shuffled: loss per rule, `[requests]`; the
            shuffled one is the mean over `SHUFFLES`. layouts: bool `[requests, blocks]` per rule.
    """

    kinds: list[str]
    lengths: list[int]
    chain: Array
    gated: dict[str, Array] = field(default_factory=dict)
    shuffled: dict[str, Array] = field(default_factory=dict)
    layouts: dict[str, torch.Tensor] = field(default_factory=dict)


def measure_table(
    model: MorphModel,
    requests: Requests,
    rows: list[int],
    gates: GateStack,
    ranking: list[int],
    rules: dict[str, torch.Tensor],
    batch_tokens: int,
) -> Table:
    """Losses of the static chain, of the gates under each named rule `[rows, blocks]`, and of shuffled masks."""
    blocks = model.config.num_blocks
    chain_rules = fixed_rules(nested_layouts(ranking, [min(k, blocks) for k in CHAIN]))
    lengths = [len(requests.prompts[r]) for r in rows]
    stacked = torch.stack(list(rules.values()), dim=1)
    jobs = [(r, torch.cat([chain_rules, stacked[i]])) for i, r in enumerate(rows)]
    found = measure(model, requests, jobs, gates, batch_tokens=batch_tokens)
    loss = found.loss.view(len(rows), -1).double().numpy()
    layouts = found.layouts.view(len(rows), -1, blocks)
    table = Table([requests.kinds[r] for r in rows], lengths, loss[:, : len(CHAIN)])
    masks = []
    for number, name in enumerate(rules):
        table.gated[name] = loss[:, len(CHAIN) + number]
        table.layouts[name] = layouts[:, len(CHAIN) + number]
        masks += [shuffle_within_buckets(table.layouts[name], lengths, seed) for seed in range(SHUFFLES)]
    stacked = torch.stack(masks, dim=1)
    jobs = [(r, fixed_rules(stacked[i])) for i, r in enumerate(rows)]
    found = measure(model, requests, jobs, batch_tokens=batch_tokens)
    shuffled = found.loss.view(len(rows), len(rules), SHUFFLES).mean(-1).double().numpy()
    table.shuffled = {name: shuffled[:, number] for number, name in enumerate(rules)}
    return table


def compare(table: Table, ranking: list[int], saved: torch.Tensor) -> dict[str, Any]:
    """Ratios of gated loss to each baseline at equal spending, with intervals, per rule and per kind."""
    blocks = saved.shape[1]
    chain_layouts = nested_layouts(ranking, [min(k, blocks) for k in CHAIN])
    count = len(table.lengths)
    per_request = {
        "count": (
            np.tile(chain_layouts.sum(1).numpy().astype(float), (count, 1)),
            {name: bits.sum(1).numpy().astype(float) for name, bits in table.layouts.items()},
        ),
        "cost": (
            (saved.double() @ chain_layouts.double().T).numpy(),
            {name: (saved * bits).sum(1).double().numpy() for name, bits in table.layouts.items()},
        ),
    }
    # Static, but with attention for free where it is cheaper: what the length alone can do.
    free = (saved <= 0).all(1).numpy()
    aware = np.where(free[:, None], 0.0, table.chain)
    aware_cost = np.where(free[:, None], saved.double().sum(1).numpy()[:, None], per_request["cost"][0])
    report: dict[str, Any] = {}
    for name, gated in table.gated.items():
        mode = "count" if name.startswith("k") else "cost"
        spent, own = per_request[mode][0], per_request[mode][1][name]
        entry: dict[str, Any] = {
            "loss": round(float(gated.mean()), 5),
            "mean_attention_blocks": round(float(per_request["count"][1][name].mean()), 3),
            "distinct_layouts": len({tuple(row) for row in table.layouts[name].int().tolist()}),
            "vs_shuffled": bootstrap_ratio(mean_of(gated), mean_of(table.shuffled[name]), count).to_dict(),
            "vs_static": bootstrap_ratio(mean_of(gated), static_at(table.chain, spent, own), count).to_dict(),
            "vs_oracle_count": bootstrap_ratio(
                mean_of(gated), oracle_at(table.chain, spent, own), count, 200
            ).to_dict(),
        }
        if mode == "cost":
            entry["vs_static_length_aware"] = bootstrap_ratio(
                mean_of(gated), static_at(aware, aware_cost, own), count
            ).to_dict()
        entry["kinds"] = {
            kind: {
                "loss": round(float(gated[rows].mean()), 4),
                "attention_blocks": round(float(per_request["count"][1][name][rows].mean()), 2),
            }
            for kind in sorted(set(table.kinds))
            for rows in [np.flatnonzero(np.array(table.kinds) == kind)]
        }
        report[name] = entry
    report["static_chain"] = {str(k): round(float(v), 5) for k, v in zip(CHAIN, table.chain.mean(0), strict=True)}
    return report


def rules_for(saved: torch.Tensor, taus: dict[str, float], flat_taus: dict[str, float]) -> dict[str, torch.Tensor]:
    """Rules by name: budgets `b25` by seconds, counts `k8` by number of blocks."""
    rules = {name: rules_of(tau, torch.ones_like(saved)) for name, tau in flat_taus.items()}
    return rules | {name: rules_of(tau, saved) for name, tau in taus.items()}


def count_taus(
    model: MorphModel, requests: Requests, rows: list[int], gates: GateStack, batch_tokens: int
) -> dict[str, float]:
    """τ at which the gates give 4, 8 and 15 blocks attention on average, when every block costs the same."""
    blocks = model.config.num_blocks
    flat = torch.ones(len(rows), blocks)

    def run(rules: torch.Tensor) -> torch.Tensor:
        jobs = [(r, rules[i]) for i, r in enumerate(rows)]
        found = measure(model, requests, jobs, gates, batch_tokens=batch_tokens, losses=False)
        return found.layouts.view(rules.shape)

    first = measure(model, requests, [(r, flat[:1] * 0) for r in rows], gates, batch_tokens=batch_tokens, losses=False)
    assert first.utilities is not None
    shares = [k / blocks for k in COUNTS]
    taus, _ = calibrate(run, first.utilities, flat, shares, shares, rounds=3)
    return {f"k{k}": tau for k, tau in zip(COUNTS, taus, strict=True)}


def gate_cost_share(model: MorphModel, policy: UtilityPolicy, lengths: tuple[int, ...] = (64, 256)) -> dict[str, float]:
    """Seconds of all gate decisions, the running sums included, over seconds of an all-attention prefill."""
    hidden, blocks = model.config.hidden_size, model.config.num_blocks
    shares = {}
    for n in lengths:
        tokens = torch.randint(0, model.config.vocab_size, (1, n))
        normed = torch.randn(n, hidden)

        def prefill(tokens: torch.Tensor = tokens) -> None:
            model.hidden_states(tokens)

        def decide(normed: torch.Tensor = normed, n: int = n) -> None:
            carry = policy.initial_carry()
            for block in range(blocks):
                if policy.gates[block] is not None:
                    policy.decide(block, normed.double().sum(0), normed[-1], n, carry)

        shares[str(n)] = _best_seconds(decide) / _best_seconds(prefill)
    return shares


def _best_seconds(run: Any, repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        with torch.no_grad():
            run()
        best = min(best, time.perf_counter() - begin)
    return best


def stack_of(weights: list[GateWeights | None], device: torch.device) -> GateStack:
    """Gates of a model folder as the stack that `measure` takes; static blocks get zeros."""
    sample = next(w for w in weights if w is not None)
    filled = [w or GateWeights(sample.fc1 * 0, sample.bias1 * 0, sample.fc2 * 0, 0.0) for w in weights]
    return GateStack(
        torch.stack([w.fc1 for w in filled]),
        torch.stack([w.bias1 for w in filled]),
        torch.stack([w.fc2 for w in filled]),
        torch.tensor([w.bias2 for w in filled]),
    ).to(device)


def machine(device: str) -> dict[str, str]:
    """What the numbers were measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "python": platform.python_version(), "torch": torch.__version__}


def claims(report: dict[str, Any], cost_share: dict[str, float] | None) -> dict[str, Any]:
    """Figures that the docs state, with their goals."""
    out: dict[str, Any] = {}
    for name in ("b25", "b50"):
        out[f"model.r1.gate_vs_shuffled.{name}"] = {**report[name]["vs_shuffled"], "goal": "< 1"}
        out[f"model.r1.gate_vs_static_cost.{name}"] = {**report[name]["vs_static"], "goal": "< 1"}
    for name in ("k4", "k8", "k15"):
        out[f"model.r1.gate_vs_shuffled.{name}"] = {**report[name]["vs_shuffled"], "goal": "< 1"}
        out[f"model.r1.gate_vs_static.{name}"] = {**report[name]["vs_static"], "goal": "< 1"}
    if cost_share is not None:
        out["model.r1.gate_cost_share"] = {"value": round(max(cost_share.values()), 5), "goal": "<= 0.01"}
    return out


def main() -> None:
    """Evaluate the gates of a model folder."""
    from transformers import AutoTokenizer

    from morph.checkpoint import open_model
    from morph.gate.policy import Gates

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=40, help="per evaluation set")
    parser.add_argument("--longest", type=int, default=4000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    source = open_model(args.model)
    gates = Gates.load(source)
    ranking = source.meta["gate"]["static_ranking"]
    on_gpu = args.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = MorphModel.from_source(source, source.config, dtype, args.device)
    tokenizer = AutoTokenizer.from_pretrained(source.tokenizer_dir)
    pairs = [(p, tokenize(tokenizer, p, args.longest)) for p in evaluation_prompts(args.data, args.requests)]
    pairs = [(p, ids) for p, ids in pairs if ids]
    prompts = [ids for _, ids in pairs]
    requests = Requests(prompts, [p.kind for p, _ in pairs], ["eval"] * len(pairs), sample_answers(model, prompts))
    rows, batch_tokens = list(range(len(requests))), 65_536 if on_gpu else 4096
    stack = stack_of(gates.weights, model.embedding.weight.device)
    saved = saved_matrix(gates.cost, requests.lengths)
    flat = count_taus(model, requests, rows, stack, batch_tokens)
    rules = rules_for(saved, {f"b{round(100 * b)}": gates.tau_of(b) for b in BUDGETS}, flat)
    table = measure_table(model, requests, rows, stack, ranking, rules, batch_tokens)
    report = compare(table, ranking, saved)
    share = None if on_gpu else gate_cost_share(model, gates.policy(0.5))
    result = {
        "machine": machine(args.device),
        "command": " ".join(["python", *sys.argv]),
        "requests": len(requests),
        "claims": claims(report, share),
        "eval": report,
    }
    print(json.dumps(result["claims"], indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
