"""Gates of a model against shuffled masks, the best static layouts and an oracle over counts.

    python -m benchmarks.gate_eval MODEL --requests requests.npz --device cuda --dtype bfloat16

Only requests of the split `eval` are used: no gate was fitted, chosen or calibrated on them. Each layout's loss is
KL(base || model) per token of the base's answer. `--data DIR` draws prompts from the evaluation sets in DIR/eval, and
lets the base answer them. Needs a GPU for hundreds of requests; try `--count 20` on a CPU.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table as TextTable

from benchmarks.claims import RESULTS
from benchmarks.report import header, write_results
from morph.checkpoint import open_model
from morph.checkpoint.tokenizer import load_tokenizer
from morph.errors import InvalidRequest
from morph.gate.answers import Requests, sample_answers
from morph.gate.calibrate import rules_of, saved_matrix
from morph.gate.collect import fixed_rules, force_rules, measure
from morph.gate.evaluate import (
    Array,
    bootstrap_ratio,
    mean_of,
    oracle_at,
    shuffle_within_buckets,
    static_at,
)
from morph.gate.fit import GateStack
from morph.gate.layouts import nested_layouts
from morph.gate.policy import Gates
from morph.gate.prompts import given_requests
from morph.gate.traffic import LETTERS, Prompt, json_lines, tokenize, user
from morph.hub import resolve_model
from morph.model.model import MorphModel

CHAIN = (0, 1, 2, 3, 4, 6, 8, 10, 12, 15, 18, 20, 22, 25, 28, 30)
BUDGETS = (0.05, 0.1, 0.25, 0.5, 0.75)
CLAIMED_BUDGETS = (0.25, 0.5)
SHUFFLES = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BATCH_TOKENS = {"cpu": 8192, "cuda": 655_360}


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
        counts: of the static chain. chain: `[requests, counts]`, losses of static layouts.
        gated, shuffled: loss per rule, `[requests]`; the shuffled one is the mean over `SHUFFLES`.
        layouts: bool `[requests, blocks]` per rule.
    """

    kinds: list[str]
    lengths: list[int]
    counts: list[int]
    chain: Array
    gated: dict[str, Array] = field(default_factory=dict)
    shuffled: dict[str, Array] = field(default_factory=dict)
    layouts: dict[str, torch.Tensor] = field(default_factory=dict)


def measure_table(
    model: MorphModel,
    requests: Requests,
    rows: Sequence[int],
    gates: GateStack,
    ranking: Sequence[int],
    rules: dict[str, torch.Tensor],
    batch_tokens: int,
) -> Table:
    """Losses of the static chain, of the gates under each named rule `[rows, blocks]`, and of shuffled masks."""
    blocks = model.config.num_blocks
    counts = sorted({min(k, blocks) for k in CHAIN})
    chain_rules = fixed_rules(nested_layouts(ranking, counts))
    lengths = [len(requests.prompts[r]) for r in rows]
    stacked = torch.stack(list(rules.values()), dim=1)
    jobs = [(r, force_rules(torch.cat([chain_rules, stacked[i]]), model.config)) for i, r in enumerate(rows)]
    found = measure(model, requests, jobs, gates, batch_tokens=batch_tokens)
    loss = found.loss.view(len(rows), -1).double().numpy()
    layouts = found.layouts.view(len(rows), -1, blocks)
    table = Table([requests.kinds[r] for r in rows], lengths, counts, loss[:, : len(counts)])
    masks = []
    for number, name in enumerate(rules):
        table.gated[name] = loss[:, len(counts) + number]
        table.layouts[name] = layouts[:, len(counts) + number]
        masks += [shuffle_within_buckets(table.layouts[name], lengths, seed) for seed in range(SHUFFLES)]
    stacked = torch.stack(masks, dim=1)
    found = measure(
        model, requests, [(r, fixed_rules(stacked[i])) for i, r in enumerate(rows)], batch_tokens=batch_tokens
    )
    shuffled = found.loss.view(len(rows), len(rules), SHUFFLES).mean(-1).double().numpy()
    table.shuffled = {name: shuffled[:, number] for number, name in enumerate(rules)}
    return table


def compare(table: Table, ranking: Sequence[int], saved: torch.Tensor) -> dict[str, Any]:
    """Ratios of gated loss to each baseline at equal spending, with intervals, per rule and per kind."""
    chain_layouts = nested_layouts(ranking, table.counts)
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
    report["static_chain"] = {
        str(k): round(float(v), 5) for k, v in zip(table.counts, table.chain.mean(0), strict=True)
    }
    return report


def rules_for(saved: torch.Tensor, gates: Gates, count_tau: dict[str, float]) -> dict[str, torch.Tensor]:
    """Rules by name: mean counts of attention blocks `k8`, and budgets `b25` by seconds; all calibrated at fit time."""
    flat = torch.zeros_like(saved)
    flat[:, [block for block, gate in enumerate(gates.weights) if gate is not None]] = 1.0
    rules = {f"k{count}": rules_of(tau, flat) for count, tau in count_tau.items()}
    return rules | {f"b{round(100 * b)}": rules_of(gates.tau_of(b), saved) for b in BUDGETS}


def claims_of(report: dict[str, Any], revision: str) -> list[dict[str, Any]]:
    """A claim's value is the upper end of the 95 % interval of a loss ratio: met means significantly better."""
    claims = []
    for name, entry in report.items():
        if name == "static_chain" or (
            name[0] == "b" and int(name[1:]) not in [round(100 * b) for b in CLAIMED_BUDGETS]
        ):
            continue
        static = "vs_static_length_aware" if "vs_static_length_aware" in entry else "vs_static"
        for what, key in (("shuffled", "vs_shuffled"), (static.removeprefix("vs_"), static)):
            ratio = entry[key]
            claims.append(
                {
                    "id": f"model.{revision}.gate_vs_{what}.{name}.upper95",
                    "value": ratio["high"],
                    "goal": "< 1",
                    "ratio": ratio["value"],
                    "low": ratio["low"],
                }
            )
    return claims


def show(report: dict[str, Any]) -> TextTable:
    """The ratios as a table for the terminal."""
    table = TextTable(
        "rule", "blocks", "loss", "of shuffled", "of static", "of static, length-aware", "of oracle count"
    )
    for name, entry in report.items():
        if name == "static_chain":
            continue
        cells = [
            f"{r['value']:.3f} ({r['low']:.3f}…{r['high']:.3f})" if r else ""
            for r in (entry.get(k) for k in ("vs_shuffled", "vs_static", "vs_static_length_aware", "vs_oracle_count"))
        ]
        table.add_row(name, f"{entry['mean_attention_blocks']:.1f}", f"{entry['loss']:.4f}", *cells)
    return table


def drawn(model: MorphModel, tokenizer: Any, data: Path, per_set: int, longest: int, batch_tokens: int) -> Requests:
    """Requests of the evaluation sets with the base's answers."""
    pairs = [(p, tokenize(tokenizer, p, longest)) for p in evaluation_prompts(data, per_set)]
    pairs = [(p, ids) for p, ids in pairs if ids]
    prompts = [ids for _, ids in pairs]
    answers = sample_answers(model, prompts, batch_tokens=batch_tokens)
    return Requests(prompts, [p.kind for p, _ in pairs], ["eval"] * len(pairs), answers)


def main(
    model: Annotated[str, typer.Argument(help="Name or folder of a model with gates.")] = "smollm2-135m",
    requests: Annotated[Path | None, typer.Option("--requests", help="File of requests (.npz).")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Folder with eval/, instead of --requests.")] = None,
    split: Annotated[str, typer.Option("--split", help="Split of the requests.")] = "eval",
    count: Annotated[
        int | None, typer.Option("--count", min=2, help="Requests at most (with --data: per set).")
    ] = None,
    longest: Annotated[int, typer.Option("--longest", min=16, help="Longest prompt of --data.")] = 4000,
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device")] = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option("--dtype")] = "float32",
    batch_tokens: Annotated[int | None, typer.Option("--batch-tokens", min=1, help="Padded tokens per pass.")] = None,
    results: Annotated[Path, typer.Option("--results", help="Folder for the JSON file.")] = RESULTS,
    name: Annotated[str | None, typer.Option("--name", help="Of the result file; default: gates_REVISION.")] = None,
) -> None:
    """Evaluate the gates of a model on requests that they never saw."""
    if (requests is None) == (data is None):
        raise typer.BadParameter("give either --requests or --data")
    folder = resolve_model(model)
    source = open_model(folder)
    gates, meta = Gates.load(source), source.meta["gate"]
    for key in ("static_ranking", "count_tau"):
        if key not in meta:
            raise InvalidRequest(f"config.json has no gate.{key}; fit the gates with `morph gate fit`")
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    tokens = batch_tokens or BATCH_TOKENS[device]
    network = MorphModel.from_source(source, source.config, DTYPES[dtype], device)
    if requests is not None:
        given = given_requests(requests, source.config)
        rows = given.where(split)[:count]
    else:
        assert data is not None
        given = drawn(network, load_tokenizer(source.tokenizer_dir), data, count or 40, longest, tokens)
        rows = list(range(len(given)))
    if len(rows) < 2 or not all(given.answers[r] for r in rows):
        raise InvalidRequest(f"{len(rows)} requests of split {split!r} with answers are too few; give others")
    saved = saved_matrix(gates.cost, [len(given.prompts[r]) for r in rows])
    stack = GateStack.of(gates.weights).to(network.embedding.weight.device)
    ranking = meta["static_ranking"]
    table = measure_table(network, given, rows, stack, ranking, rules_for(saved, gates, meta["count_tau"]), tokens)
    report = compare(table, ranking, saved)
    revision = str(source.meta.get("revision"))
    console = Console(width=140)
    console.print(show(report))
    content = header()
    if device == "cuda":
        content["machine"]["gpu"] = torch.cuda.get_device_name()
    content |= {
        "about": {
            "loss": "KL(base || model) per answer token",
            "requests": len(rows),
            "split": split,
            "kinds": sorted(set(table.kinds)),
            "dtype": dtype,
            "fit": meta.get("fit"),
            "shuffled": f"layouts exchanged between requests of similar length, mean of {SHUFFLES} shuffles",
            "static": "nested layouts by the best measured ranking, interpolated to equal spending",
            "static_length_aware": "static, with attention where it is cheaper; the fair one at budgets",
            "interval": "95 % bootstrap over requests",
            "claims": "value is the upper end of the interval; ratio and low stand beside it",
        },
        "eval": report,
        "claims": claims_of(report, revision),
    }
    console.print(f"written to {write_results(results, name or f'gates_{revision}', content)}")


if __name__ == "__main__":
    typer.run(main)
