"""The context cache on traffic with shared prefixes, without a model: real tree, pool, page tables and policies.

    python -m benchmarks.cache_replay --name cache_replay                    # recorded articles and conversations
    python -m benchmarks.cache_replay --traces FOLDER --name cache_traces    # Mooncake's public traces

Requests run one after the other; layouts are what the real model's gates decided (`benchmarks/cache_record.py`).
`conventional` is a prefix cache that is not made for hybrids; `junctions` keeps states at the end of prompts, of
answers and where prompts were seen to part, LRU; `marconi` evicts by recency + α · FLOPs per byte with the α that was best in
hindsight for that run; `lru` and `morph` are this project's placement of checkpoints with two evictions; `auto` lets
requests adopt a cached layout; `bound` is what no cache of that size can exceed at exact layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.cache_systems import Conventional, MorphCache, Tally, best_possible
from benchmarks.cache_traffic import Recorded, Turn, articles, conversations, mooncake
from benchmarks.claims import RESULTS, Claim, claims_table
from benchmarks.report import header, write_results
from morph.cache.eviction import GreedyDual, LeastRecent, Marconi
from morph.config import ModelConfig

DATA = Path(__file__).parent / "data"
SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
ALPHAS = (0.0, 0.5, 2.0)
COLUMNS = ("conventional", "junctions", "marconi", "lru", "morph", "auto", "bound")

Progress = Callable[[str], None]


def run(system: MorphCache | Conventional, turns: Sequence[Turn]) -> Tally:
    """All requests through one system."""
    for turn in turns:
        system.serve(turn)
    return system.tally


class Replay:
    """One workload under all systems.

    Args:
        config: the model's shape.
    """

    def __init__(self, config: ModelConfig, turns: Sequence[Turn], rate: float) -> None:
        self.config, self.turns, self.rate = config, turns, rate
        self.context = max(len(turn.prompt) + len(turn.answer) for turn in turns) + 64
        everything = self.morph(1 << 24)
        self.most = run(everything, turns)
        self.working_set = everything.cache.held_units

    def morph(
        self, units: int, policy: str = "greedy_dual", learn: bool = True, affinity: str | float = 0, alpha: float = 1.0
    ) -> MorphCache:
        """A fresh cache of this project."""
        evictor = {"greedy_dual": GreedyDual, "lru": LeastRecent, "marconi": lambda: Marconi(alpha)}[policy]()
        return MorphCache(self.config, units, evictor, self.context, learn, affinity, self.rate)

    def point(self, units: int, with_auto: bool = True) -> dict[str, Any]:
        """All systems at one size of memory."""
        found: dict[str, Tally] = {
            "conventional": run(Conventional(self.config, units), self.turns),
            "junctions": run(self.morph(units, "lru", learn=False), self.turns),
            "lru": run(self.morph(units, "lru"), self.turns),
            "morph": run(self.morph(units), self.turns),
        }
        tried = [(run(self.morph(units, "marconi", learn=False, alpha=alpha), self.turns), alpha) for alpha in ALPHAS]
        found["marconi"], alpha = max(tried, key=lambda entry: entry[0].saved)
        if with_auto:
            found["auto"] = run(self.morph(units, affinity="auto"), self.turns)
        row: dict[str, Any] = {
            "units": units,
            "share_of_working_set": units / self.working_set,
            "marconi_alpha": alpha,
            "bound": {"hit_rate": best_possible(self.config, self.turns, units)},
        }
        for name, tally in found.items():
            row[name] = {"hit_rate": tally.hit_rate, "saved_share": tally.saved_share, "restarts": tally.restarts}
            if name == "auto":
                row[name] |= {"adopted": tally.adopted, "regret_nats": tally.regret / max(1, tally.adopted)}
        return row

    def sweep(self, progress: Progress, shares: Sequence[float] = SHARES, with_auto: bool = True) -> dict[str, Any]:
        """All systems from tight memory to all that the workload can fill."""
        rows = []
        for share in shares:
            rows.append(self.point(int(share * self.working_set), with_auto))
            progress(f"  memory {share:.0%} of {self.working_set} units")
        return {
            "requests": len(self.turns),
            "prompt_tokens": sum(len(turn.prompt) for turn in self.turns),
            "distinct_layouts": len({turn.bits for turn in self.turns}),
            "mean_attention_blocks": sum(sum(turn.bits) for turn in self.turns) / len(self.turns),
            "working_set_units": self.working_set,
            "hit_rate_without_limit": self.most.hit_rate,
            "rows": rows,
        }

    def units_where_conventional_reads(self, rate: float, tolerance: float = 0.01) -> int | None:
        """Memory at which the conventional cache has that hit rate; None where it never has."""
        low, high = 1, 64 * self.working_set
        while high - low > max(1, low // 200):
            middle = (low + high) // 2
            if run(Conventional(self.config, middle), self.turns).hit_rate < rate:
                low = middle
            else:
                high = middle
        found = run(Conventional(self.config, high), self.turns).hit_rate
        return high if abs(found - rate) <= tolerance else None


def table(title: str, result: dict[str, Any], figure: str = "hit_rate") -> Table:
    """Hit rates of a sweep."""
    shown = Table("memory", *COLUMNS, title=title)
    for row in result["rows"]:
        cells = [f"{row[name][figure]:.1%}" if name in row and figure in row[name] else "–" for name in COLUMNS]
        shown.add_row(f"{row['share_of_working_set']:.0%}", *cells)
    return shown


def recorded_workloads(
    config: ModelConfig, rate: float, file: Path, budget: float, requests: int, console: Console
) -> tuple[dict[str, Any], list[Claim]]:
    """Articles and conversations."""
    results: dict[str, Any] = {}
    claims: list[Claim] = []
    user = Recorded(file, "user", budget)
    for count, target, goal in ((10, 0.187, 2.3), (20, 0.07, 3.4), (20, 0.187, 2.3), (40, 0.07, 3.4)):
        name = f"articles.{count}"
        turns = articles(user, count, requests)
        replay = Replay(config, turns, rate)
        if name not in results:
            results[name] = replay.sweep(console.print)
            console.print(table(f"{count} articles: token hit rate", results[name]))
        units = replay.units_where_conventional_reads(target)
        if units is None:
            results[name].setdefault("fixed", []).append({"target": target, "reached": False})
            continue
        point = replay.point(units)
        results[name].setdefault("fixed", []).append({"target": target, "reached": True} | point)
        read, ours = point["conventional"]["hit_rate"], point["morph"]["hit_rate"]
        key = f"cache.articles.{count}.at_{100 * target:g}"
        claims.append(Claim(f"{key}.vs_conventional", ours / read, f">= {goal}"))
        claims.append(Claim(f"{key}.vs_junctions", ours / point["junctions"]["hit_rate"], ">= 1.3"))
        claims.append(Claim(f"{key}.share_of_bound", ours / point["bound"]["hit_rate"], ">= 0.0"))
        claims.append(Claim(f"{key}.auto_hit_rate", point["auto"]["hit_rate"], ">= 0.0"))
    for name, traffic in (
        ("chat", conversations(Recorded(file, "chat", budget))),
        ("chat.early", conversations(Recorded(file, "chat", budget, early=True))),
        ("system", articles(Recorded(file, "system", budget), 20, requests)),
        ("system.early", articles(Recorded(file, "system", budget, early=True), 20, requests)),
    ):
        results[name] = Replay(config, traffic, rate).sweep(console.print)
        console.print(table(f"{name}: token hit rate", results[name]))
    return results, claims


def trace_claims(name: str, result: dict[str, Any]) -> list[Claim]:
    """Against Marconi at all sizes, against LRU at the tightest."""
    rows = result["rows"]
    worst = min(row["morph"]["hit_rate"] / max(1e-9, row["marconi"]["hit_rate"]) for row in rows)
    tight = rows[0]
    return [
        Claim(f"cache.trace.{name}.hit_rate_vs_marconi.worst", worst, ">= 1.0"),
        Claim(
            f"cache.trace.{name}.saved_flops_vs_lru.tightest",
            tight["morph"]["saved_share"] / max(1e-9, tight["junctions"]["saved_share"]),
            ">= 1.2",
        ),
        Claim(
            f"cache.trace.{name}.share_of_bound.tightest",
            tight["morph"]["hit_rate"] / max(1e-9, tight["bound"]["hit_rate"]),
            ">= 0.0",
        ),
    ]


def main(
    model: Annotated[str, typer.Option(help="Model whose shape is used.")] = "smollm2-135m",
    traffic: Annotated[Path, typer.Option(help="Recorded traffic.")] = DATA / "cache_traffic_r2.npz",
    budget: Annotated[float, typer.Option(help="Attention budget of the recorded layouts: 0.25 or 0.5.")] = 0.5,
    requests: Annotated[int, typer.Option(help="Requests per workload.")] = 400,
    traces: Annotated[Path | None, typer.Option(help="Folder with mooncake_*.jsonl.gz; replayed instead.")] = None,
    name: Annotated[str, typer.Option(help="Name of the result file.")] = "cache_replay",
) -> None:
    """Replay, print tables, write JSON."""
    from morph.checkpoint import open_model
    from morph.gate.policy import Gates
    from morph.hub.pull import resolve_model

    console = Console()
    source = open_model(resolve_model(model))
    policy = Gates.load(source).policy(budget)
    rate = policy.cost.flops_per_second
    claims: list[Claim] = []
    if traces is None:
        results, claims = recorded_workloads(source.config, rate, traffic, budget, requests, console)
    else:
        results = {}
        lent = Recorded(traffic, "user", budget).layouts()
        for trace in ("mooncake_conversation", "mooncake_synthetic"):
            turns = mooncake(traces / f"{trace}.jsonl.gz", requests, lent)
            results[trace] = Replay(source.config, turns, rate).sweep(
                console.print, (0.05, 0.15, 0.4, 1.0), with_auto=False
            )
            console.print(table(f"{trace}: token hit rate", results[trace]))
            console.print(table(f"{trace}: prefill FLOPs saved", results[trace], "saved_share"))
            claims += trace_claims(trace, results[trace])
    console.print(claims_table([(f"{name}.json", claim) for claim in claims]))
    content = header() | {"budget": budget, "workloads": results, "claims": [asdict(claim) for claim in claims]}
    write_results(RESULTS, name, content)


if __name__ == "__main__":
    typer.run(main)
