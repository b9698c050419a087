"""The CUDA kernels one by one, at the Llama-3.1-8B shape: bytes or operations per second against what the card reaches.

    python -m benchmarks.gpu_kernels

Few-row cases run as CUDA graphs of calls over operands that take turns, so that nothing stays in the cache.
"""

# Closures here are called before their loop moves on.
# ruff: noqa: B023
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.claims import RESULTS
from benchmarks.gpu_decode import copy_bandwidth
from benchmarks.gpu_models import replay_seconds
from benchmarks.report import header, write_results
from morph.kernels.cuda import attention_decode, attention_prefill, gdn_decode, gdn_prefill
from morph.kernels.cuda.row_linear import Tile, default_tile, row_linear
from morph.kernels.interface import SSMParams

HEADS, KV_HEADS, DIM, HIDDEN = 32, 8, 128, 4096
COPIES = 12
TILES = {
    64: [Tile(64, 32, 128, 4, 4), Tile(64, 32, 256, 4, 3), Tile(64, 64, 128, 4, 3), Tile(64, 32, 128, 8, 5)],
    256: [Tile(64, 32, 128, 4, 4), Tile(128, 64, 64, 4, 4), Tile(128, 32, 128, 4, 3), Tile(256, 32, 64, 8, 4)],
}
DECODE = [(64, 4, 5), (64, 4, 3), (64, 4, 6), (128, 4, 5), (128, 8, 5), (32, 4, 6)]
STATES = [(32, 4), (16, 4), (32, 2), (64, 4), (64, 8), (128, 8)]


def device_seconds(calls: list[Callable[[], Any]], repeats: int = 15) -> float:
    """Median seconds of one call, of a graph that makes all of them in turn."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return replay_seconds(graph, repeats) / len(calls)


def row_map_figures(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Row-mapped products against cuBLAS over all rows, at several live counts."""
    found = []
    for n in (6144, 4096):
        weights = [torch.randn(n, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(COPIES)]
        for rows, tiles in TILES.items():
            x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
            index = torch.arange(rows, device="cuda", dtype=torch.int32)
            dense = device_seconds([lambda w=w: torch.mm(x, w.t(), out=out) for w in weights])
            for tile in dict.fromkeys([default_tile(rows, n, HIDDEN), *tiles]):
                times = {}
                for live in (rows, rows // 2, 8, 0):
                    count = torch.tensor([live], device="cuda", dtype=torch.int32)
                    calls = [
                        lambda w=w, c=count, t=tile: row_linear(x, w, out, c, index, gather=True, tile=t)
                        for w in weights
                    ]
                    try:
                        times[live] = device_seconds(calls)
                    except Exception as error:
                        say(f"{tile}: {type(error).__name__}")
                        break
                else:
                    found.append({"n": n, "rows": rows, "tile": list(tile), "cublas": dense, "live": times})
                    shown = " ".join(f"{k}:{v * 1e6:.1f}" for k, v in times.items())
                    say(f"n {n} rows {rows} {tuple(tile)} cublas {dense * 1e6:.1f} row map {shown}")
    return found


def attention_figures(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Decode attention: bytes of keys and values over time."""
    found = []
    for rows, context in ((64, 8192), (64, 1024), (8, 32768)):
        tokens = DIM  # of one bfloat16 page
        per = -(-context // tokens)
        units = rows * KV_HEADS * per
        pages = torch.empty(units + 1, 2 * tokens * DIM, device="cuda", dtype=torch.bfloat16).normal_()
        table = (torch.randperm(units, device="cuda") + 1).int().view(rows, KV_HEADS * per)
        q = torch.randn(rows, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
        index = torch.arange(rows, device="cuda", dtype=torch.int32)
        positions = torch.full((rows,), context - 1, device="cuda", dtype=torch.int32)
        count = torch.tensor([rows], device="cuda", dtype=torch.int32)
        out = torch.empty_like(q)
        default = attention_decode.splits_for(rows, KV_HEADS, per)
        for launch in DECODE:
            for splits in dict.fromkeys([default, default * 2] if launch == DECODE[0] else [default]):
                part, stats = attention_decode.scratch(rows, HEADS, DIM, splits, q.device)
                try:
                    seconds = device_seconds([
                        lambda p=part, s=stats, c=launch: attention_decode.decode_attention(
                            q, pages, table, per, index, positions, count, DIM**-0.5, KV_HEADS, DIM, out, p, s, index, c
                        )
                    ])  # fmt: skip
                except Exception as error:
                    say(f"decode attention {launch}: {type(error).__name__} {error}"[:200])
                    continue
                rate = rows * context * KV_HEADS * DIM * 4 / seconds
                found.append({"rows": rows, "context": context, "launch": launch, "splits": splits,
                              "seconds": seconds, "bytes_per_second": rate})  # fmt: skip
                shown = f"{seconds * 1e6:.1f} us {rate / 1e12:.2f} TB/s"
                say(f"decode attention {rows}x{context} {launch} splits {splits}: {shown}")
    return found


def ssm_params(window: int) -> SSMParams:
    """Random parameters of the 8B shape."""
    angles = torch.rand(1 << 16, DIM // 2, device="cuda")
    channels = (HEADS + 2 * KV_HEADS) * DIM
    return SSMParams(
        torch.randn(channels, 4, device="cuda"),
        torch.randn(2 * HEADS, device="cuda"), torch.ones(HEADS, device="cuda"),
        torch.zeros(HEADS, device="cuda") if window else None, angles.cos(), angles.sin(), window, HEADS, KV_HEADS,
        HEADS, DIM,
    )  # fmt: skip


def state_figures(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One token of Gated DeltaNet for 64 requests, states of several blocks in turn."""
    found = []
    rows, copies = 64, 6
    for window in (0, 64):
        params = ssm_params(window)
        width = HEADS + (KV_HEADS if window else 0)
        storage = torch.empty(copies * rows * width + 1, DIM * DIM * 4, device="cuda", dtype=torch.uint8)
        storage.view(torch.bfloat16).normal_()
        tables = [
            (torch.arange(rows * width, device="cuda") + 1 + i * rows * width).int().view(rows, width)
            for i in range(copies)
        ]
        inputs = torch.randn(rows, params.qkv_size + 2 * HEADS, device="cuda", dtype=torch.bfloat16)
        tails = torch.randn(rows, 3, params.qkv_size, device="cuda")
        index = torch.arange(rows, device="cuda", dtype=torch.int32)
        positions = torch.full((rows,), 500, device="cuda", dtype=torch.int32)
        count = torch.tensor([rows], device="cuda", dtype=torch.int32)
        scratch = gdn_decode.Scratch.make(rows, HEADS, KV_HEADS, DIM, torch.device("cuda"))
        out = torch.empty(rows, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
        for launch in STATES if window == 0 else STATES[:1]:
            calls = [
                lambda t=t, c=launch, p=params, a=(storage, inputs, tails, scratch): gdn_decode.gdn_decode(
                    a[1], p, a[0], torch.bfloat16, t, index, positions, count, a[2], a[3], out, index, c
                )
                for t in tables
            ]
            seconds = device_seconds(calls)
            rate = rows * (HEADS * DIM * DIM * 8 + (KV_HEADS * DIM * 64 * 4 if window else 0)) / seconds
            found.append({"window": window, "launch": launch, "seconds": seconds, "bytes_per_second": rate})
            say(f"state update window {window} {launch}: {seconds * 1e6:.1f} us {rate / 1e12:.2f} TB/s")
    return found


def prefill_figures(say: Callable[[str], None], lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Attention of one prompt: the paged kernel and torch's backends; and the chunk scan with conv and window."""
    found = []
    for n in lengths:
        tokens, per = 128, n // 128
        pages = torch.empty(KV_HEADS * per + 1, 2 * tokens * DIM, device="cuda", dtype=torch.bfloat16).normal_()
        row = (torch.randperm(KV_HEADS * per, device="cuda") + 1).int()
        q = torch.randn(n, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, KV_HEADS, n, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(q)
        flop = 2.0 * n * n * HEADS * DIM
        entry: dict[str, Any] = {"tokens": n}

        def paged() -> None:
            attention_prefill.paged_attention(q, pages, row, per, 0, DIM**-0.5, KV_HEADS, DIM, out)

        entry["paged"] = device_seconds([paged], 5)
        query = q.view(n, HEADS, DIM).transpose(0, 1)[None]
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

            def peer(backend: SDPBackend = backend) -> None:
                with sdpa_kernel(backend):
                    F.scaled_dot_product_attention(query, k, v, is_causal=True, enable_gqa=True)

            try:
                entry[backend.name] = device_seconds([peer], 5)
            except RuntimeError as error:
                say(f"{backend.name}: {error}"[:200])
        for window in (0, 64):
            params = ssm_params(window)
            width = HEADS + (KV_HEADS if window else 0)
            storage = torch.empty(width + 1, DIM * DIM * 4, device="cuda", dtype=torch.uint8)
            table = (torch.arange(width, device="cuda") + 1).int()
            x = torch.randn(n, params.qkv_size + 2 * HEADS, device="cuda", dtype=torch.bfloat16)
            tail = torch.zeros(3, params.qkv_size, device="cuda")
            times = []
            for _ in range(4):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                gdn_prefill.gdn_prefill(x, params, storage, torch.bfloat16, table, tail, False, 0, out)
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
            entry[f"ssm_window_{window}"] = min(times[1:])
        entry["flop_per_second"] = flop / entry["paged"]
        found.append(entry)
        say(" ".join(f"{key} {value:.4g}" for key, value in entry.items()))
    return found


def claims_of(row_maps: list[dict[str, Any]], attention: list[dict[str, Any]], states: list[dict[str, Any]],
              prefill: list[dict[str, Any]], bandwidth: float) -> list[dict[str, Any]]:  # fmt: skip
    """The figures of the launch parameters that the product takes by default."""
    claims = []
    for entry in row_maps:
        if entry["tile"] == list(default_tile(entry["rows"], entry["n"], HIDDEN)):
            value = entry["cublas"] / entry["live"][entry["rows"]]
            claims.append(
                {"id": f"gpu.row_map.{entry['n']}x{entry['rows']}.vs_cublas", "value": value, "goal": ">= 0.9"}
            )
    first = next(e for e in attention if (e["rows"], e["context"], e["launch"]) == (64, 8192, DECODE[0]))
    claims.append(
        {
            "id": "gpu.decode_attention.64x8192.of_floor",
            "value": first["bytes_per_second"] / bandwidth,
            "goal": ">= 0.8",
        }
    )
    claims.append(
        {"id": "gpu.state_update.64.of_floor", "value": states[0]["bytes_per_second"] / bandwidth, "goal": ">= 0.8"}
    )
    for entry in prefill:
        best = min(entry[b] for b in ("FLASH_ATTENTION", "CUDNN_ATTENTION") if b in entry)
        claims.append(
            {"id": f"gpu.prefill_attention.{entry['tokens']}.vs_sdpa", "value": best / entry["paged"], "goal": ">= 0.9"}
        )
    return claims


def main(
    lengths: Annotated[str, typer.Option(help="Prompt lengths of the prefill cases.")] = "8192,32768",
    results: Annotated[Path, typer.Option("--results", help="Folder of result files.")] = RESULTS,
) -> None:
    """Time the kernels and write gpu_kernels.json."""
    console = Console(width=160)
    bandwidth = copy_bandwidth()
    console.print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    parts = (
        row_map_figures(console.print), attention_figures(console.print), state_figures(console.print),
        prefill_figures(console.print, tuple(map(int, lengths.split(",")))),
    )  # fmt: skip
    claims = claims_of(*parts, bandwidth)
    content = {
        "name": "gpu_kernels", **header(), "device": torch.cuda.get_device_name(), "copy_bytes_per_second": bandwidth,
        "row_map": parts[0], "decode_attention": parts[1], "state_update": parts[2], "prefill": parts[3],
        "claims": claims,
    }  # fmt: skip
    write_results(results, "gpu_kernels", content)
    table = Table("claim", "value", "goal")
    for claim in claims:
        table.add_row(claim["id"], f"{claim['value']:.3f}", claim["goal"])
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
