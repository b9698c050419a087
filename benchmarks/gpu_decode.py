"""Decode step time on a CUDA machine: what variety costs, how near the floor, what less attention saves.

    python -m benchmarks.gpu_decode --shape 8b --points 64x1024,64x8192

Weights are random (marked so in the result), the pool is filled with random values; a step is one CUDA graph replay.
The floor counts weights once, keys and values once, states read and written, over the bandwidth that a device-to-device
copy reaches. `own bytes` is the time that a mix's bytes take at the bandwidth that homogeneous batches reach, weighted
by the share of (row, block) pairs on each path; `surplus` is against the work-weighted mean of homogeneous batches.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.claims import RESULTS
from benchmarks.gpu_models import SHAPES, Bench, Layout, random_layouts, recorded_layouts
from benchmarks.report import header, write_results

COPY_BANDWIDTH = 4.3e12


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes both counted."""
    a = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    a.random_()
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        b.copy_(a)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2.0 * a.numel() / sorted(times)[len(times) // 2]


def measure(bench: Bench, layouts: list[Layout], context: int, mapped: bool = False) -> dict[str, Any]:
    """Step time and bytes of one batch."""
    batch = bench.batch(layouts, context)
    moved = batch.bytes_moved()
    seconds = batch.step_seconds()
    result = {"seconds": seconds, "bytes": moved, "bandwidth": sum(moved.values()) / seconds}
    if mapped:
        result["row_mapped_seconds"] = batch.step_seconds(uniform=False)
    del batch
    gc.collect()
    torch.cuda.empty_cache()
    return result


def point(bench: Bench, rows: int, context: int, kinds: list[Layout]) -> dict[str, Any]:
    """All-attention, all-ssm and a mix at one batch size and context."""
    blocks = bench.config.num_blocks
    mix = [kinds[i % len(kinds)] for i in range(rows)]
    s = sum(map(sum, mix)) / (rows * blocks)
    result: dict[str, Any] = {"batch": rows, "context": context, "layouts": len(set(mix)), "attention_share": s}
    for name, layouts in (
        ("attention", [(True,) * blocks] * rows),
        ("ssm", [(False,) * blocks] * rows),
        ("mixed", mix),
    ):
        result[name] = measure(bench, layouts, context, mapped=name != "mixed")
        result[name]["of_floor"] = result[name]["bandwidth"] / COPY_BANDWIDTH
    mean = s * result["attention"]["seconds"] + (1 - s) * result["ssm"]["seconds"]
    per_byte = s / result["attention"]["bandwidth"] + (1 - s) / result["ssm"]["bandwidth"]
    result["own_bytes_ratio"] = result["mixed"]["seconds"] / (sum(result["mixed"]["bytes"].values()) * per_byte)
    result["surplus"] = result["mixed"]["seconds"] / mean
    result["throughput_vs_attention"] = result["attention"]["seconds"] / result["mixed"]["seconds"]
    return result


def claims_of(shape: str, entry: dict[str, Any]) -> list[dict[str, Any]]:
    """What the figures should reach."""
    name = f"gpu.decode.{shape}.{entry['batch']}x{entry['context']}"
    surplus = 1.2 if entry["context"] < 4096 else 1.1
    found = [
        {"id": f"{name}.variety_vs_own_bytes", "value": entry["own_bytes_ratio"], "goal": "<= 1.10"},
        {"id": f"{name}.surplus_vs_homogeneous", "value": entry["surplus"], "goal": f"<= {surplus}"},
    ]
    if (shape, entry["batch"], entry["context"]) == ("8b", 64, 8192):
        for kind in ("attention", "ssm", "mixed"):
            found.append({"id": f"{name}.{kind}.of_floor", "value": entry[kind]["of_floor"], "goal": ">= 0.65"})
    if (shape, entry["batch"], entry["context"]) == ("8b", 48, 16384):
        found.append({"id": f"{name}.vs_attention", "value": entry["throughput_vs_attention"], "goal": ">= 2.0"})
    return found


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "8b",
    points: Annotated[str, typer.Option(help="BATCHxCONTEXT, comma separated.")] = "64x1024,64x8192,48x16384",
    share: Annotated[float, typer.Option(help="Share of attention in the mix.")] = 0.25,
    distinct: Annotated[int, typer.Option(help="Distinct layouts in the mix.")] = 64,
    recorded: Annotated[
        Path | None, typer.Option(help="Draw the mix from this file of recorded layouts, one bit string per line.")
    ] = None,
    results: Annotated[Path, typer.Option("--results", help="Folder of result files.")] = RESULTS,
) -> None:
    """Time decode steps and write gpu_decode_<shape>.json."""
    bench = Bench.make(shape)
    table = Table(
        "batch", "context", "attention ms", "ssm", "mixed", "of floor", "own bytes", "surplus", "vs attention"
    )
    entries, claims = [], []
    for text in points.split(","):
        rows, context = map(int, text.split("x"))
        if recorded is None:
            kinds = random_layouts(bench.config, min(rows, distinct), share)
        else:
            kinds = recorded_layouts(bench.config, recorded, rows)
        entry = point(bench, rows, context, kinds)
        entries.append(entry)
        claims += claims_of(shape, entry)
        table.add_row(
            str(rows), str(context),
            *(f"{entry[k]['seconds'] * 1e3:.2f}" for k in ("attention", "ssm", "mixed")),
            "/".join(f"{entry[k]['of_floor']:.2f}" for k in ("attention", "ssm", "mixed")),
            f"{entry['own_bytes_ratio']:.3f}", f"{entry['surplus']:.3f}", f"{entry['throughput_vs_attention']:.2f}",
        )  # fmt: skip
        content = {
            "name": f"gpu_decode_{shape}", **header(), "device": torch.cuda.get_device_name(),
            "weights": "random",
            "layouts": recorded.name if recorded else f"random, {distinct} distinct, {share} attention per block",
            "floor_bytes_per_second": COPY_BANDWIDTH, "points": entries, "claims": claims,
        }  # fmt: skip
        write_results(results, f"gpu_decode_{shape}", content)
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
