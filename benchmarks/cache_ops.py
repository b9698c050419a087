"""What a lookup and an insertion cost the engine, with many entries in the tree.

    python -m benchmarks.cache_ops

Prompts of 2,048 shared and 40 own tokens, 64 layouts, in the shape of a real model; the books alone, no numbers.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.claims import RESULTS, Claim, claims_table
from benchmarks.report import header, write_results
from morph.cache.context_cache import ContextCache
from morph.cache.cost import PrefillCost
from morph.cache.snapshot import BlockData
from morph.cache.tree import encode
from morph.memory.pool import UnitPool
from morph.memory.tables import UnitLayout


def measure(model: str, nodes: int, timed: int, documents: int = 200) -> dict[str, float]:
    """Milliseconds of lookups and insertions once the tree has so many nodes."""
    from morph.checkpoint import open_model
    from morph.hub.pull import resolve_model

    config = open_model(resolve_model(model)).config
    layout = UnitLayout.of(config, torch.bfloat16, 8192)
    per_entry = config.num_blocks * max(layout.state_units, layout.kv_heads)
    pool = UnitPool((nodes + timed) * per_entry, layout.unit_bytes, "meta")
    cache = ContextCache(pool, PrefillCost(config), nodes * per_entry, most_aside=1 << 60)
    rng, draw = random.Random(0), np.random.default_rng(0)
    texts = [draw.integers(0, config.vocab_size, 2048).tolist() for _ in range(documents)]
    layouts = [[rng.random() < 0.3 for _ in range(config.num_blocks)] for _ in range(64)]
    lookups: list[float] = []
    both: list[float] = []
    size = 0
    while len(both) < timed:
        tokens = rng.choice(texts) + draw.integers(0, config.vocab_size, 40).tolist()
        bits = rng.choice(layouts)
        begin = time.perf_counter()
        path = encode(tokens)
        hit = cache.find("", path, len(tokens) - 1, [], config.num_blocks, gates=True)
        if hit is not None:
            cache.leave("", hit)
        looked = time.perf_counter()
        blocks = [
            BlockData(
                bit,
                pool.alloc(layout.kv_heads).reshape(-1, 1) if bit else pool.alloc(layout.state_units),
                sums=np.zeros(1),
            )
            for bit in bits
        ]
        ready = time.perf_counter()
        cache.publish("", path[:-4], bits, blocks)
        end = time.perf_counter()
        size = int(cache.stats()["cache_nodes"]) if not size or size < nodes else size
        if size >= nodes:
            lookups.append(1e3 * (looked - begin))
            both.append(1e3 * (looked - begin + end - ready))
    return {
        "nodes": float(cache.stats()["cache_nodes"]),
        "lookup_p50_ms": float(np.quantile(lookups, 0.5)),
        "lookup_p99_ms": float(np.quantile(lookups, 0.99)),
        "both_p50_ms": float(np.quantile(both, 0.5)),
        "both_p99_ms": float(np.quantile(both, 0.99)),
    }


def main(
    model: Annotated[str, typer.Option(help="Model whose shape is used.")] = "smollm2-135m",
    nodes: Annotated[int, typer.Option(help="Nodes in the tree before timing begins.")] = 100_000,
    timed: Annotated[int, typer.Option(help="Prompts that are timed.")] = 5_000,
    name: Annotated[str, typer.Option(help="Name of the result file.")] = "cache_ops",
) -> None:
    """Time lookups and insertions; print and store them."""
    found = measure(model, nodes, timed)
    claims = [Claim("cache.ops.lookup_and_insert.p99_ms", found["both_p99_ms"], "<= 0.3")]
    console = Console()
    console.print(found)
    console.print(claims_table([(f"{name}.json", claim) for claim in claims]))
    write_results(RESULTS, name, header() | {"figures": found, "claims": [asdict(claim) for claim in claims]})


if __name__ == "__main__":
    typer.run(main)
