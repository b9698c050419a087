"""The native CPU kernels against what torch offers for the same work, in one process and in turns.

    python -m benchmarks.cpu_kernels

Shapes are those of smollm2-135m. Peers: `F.linear` in the same dtype (bfloat16 activations there, float32 here) and in
float32; `scaled_dot_product_attention` over contiguous keys and values (Morph's lie in pages); for Gated DeltaNet, of
which torch has none, Morph's own reference in torch ops. A ratio is the faster peer's time over Morph's: above 1 Morph
is faster. Weights, caches and states of few-row cases take turns so that they come from memory, as in a decode step.
Timing needs a quiet machine; about three minutes on two cores.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from benchmarks.claims import RESULTS
from benchmarks.report import header, write_results
from morph.kernels.build import load_library
from morph.kernels.interface import SSMParams, page_tokens
from morph.kernels.native_backend import NativeKernels
from morph.kernels.torch_backend import TorchKernels

HIDDEN, INNER, HEADS, KV_HEADS, DIM, RANK, VOCAB = 576, 1536, 9, 3, 64, 64, 49152
QKV = (HEADS + 2 * KV_HEADS) * DIM
LINEARS = {
    "qkv": (QKV, HIDDEN),
    "out": (HIDDEN, HIDDEN),
    "ssm_in": (QKV + 2 * HEADS + RANK, HIDDEN),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "head": (VOCAB, HIDDEN),
}
"""Name -> (n, k)."""
ROWS = (1, 8, 512, 3500)
PROMPT_ROWS = 64
"""Rows from which a case stands for prefill."""
HEAD_ROWS = 8  # it only sees the last row of each request
LENGTHS = (512, 3500)
BATCH, CACHED = 8, 3500
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
COLD_BYTES = 96 << 20
"""Few-row cases cycle over this much memory, more than the caches hold."""

Run = Callable[[int], Any]
"""One call; the argument counts up, so that it can take another copy of its operands each time."""


@dataclass(frozen=True)
class Case:
    """One operation at one size, with what it is compared with.

    Attributes:
        op, size: as in claims. work: of one call. unit: `flop` or `byte`.
        peers: name -> its call.
    """

    op: str
    size: str
    dtype: str
    work: float
    unit: str
    morph: Run
    peers: dict[str, Run]


@dataclass(frozen=True)
class Result:
    """Seconds per call, rates in 1e9 of Morph's work per second, and the faster peer's time over Morph's."""

    op: str
    size: str
    dtype: str
    unit: str
    seconds: dict[str, float]
    rate: dict[str, float]
    best_peer: str
    ratio: float


def measure(case: Case, rounds: int, budget: float) -> Result:
    """Median time per call over rounds in which all take turns.

    Args:
        budget: seconds per round and call.
    """
    calls = {"morph": case.morph, **case.peers}
    counts: dict[str, int] = {}
    for name, call in calls.items():
        call(0)
        begin = time.perf_counter()
        call(1)
        counts[name] = max(1, math.ceil(budget / max(time.perf_counter() - begin, 1e-6)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            for number in range(counts[name]):
                call(number)
            seconds[name].append((time.perf_counter() - begin) / counts[name])
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(case.peers, key=lambda name: medians[name])
    return Result(
        case.op, case.size, case.dtype, case.unit,
        seconds={name: float(f"{value:.4g}") for name, value in medians.items()},
        rate={name: round(case.work / value / 1e9, 2) for name, value in medians.items()},
        best_peer=best, ratio=round(medians[best] / medians["morph"], 4),
    )  # fmt: skip


def linear_case(kernels: NativeKernels, name: str, rows: int, dtype: str) -> Case:
    """One projection over `rows` rows; of a prompt when there are many."""
    n, k = LINEARS[name]
    few = rows < PROMPT_ROWS
    weights = [
        torch.randn(n, k) / k**0.5 for _ in range(-(-COLD_BYTES // (n * k * DTYPES[dtype].itemsize)) if few else 1)
    ]
    packed = [kernels.pack_linear(weight) for weight in weights]
    x, out = torch.randn(rows, k), torch.empty(rows, n)
    linear = kernels.linear if few else kernels.prefill_linear
    peers: dict[str, Run] = {"torch_float32": lambda i: F.linear(x, weights[i % len(weights)])}
    if dtype == "bfloat16":
        half, x_half = [weight.bfloat16() for weight in weights], x.bfloat16()
        peers["torch_bfloat16"] = lambda i: F.linear(x_half, half[i % len(half)])
    work = n * k * DTYPES[dtype].itemsize if few else 2 * rows * n * k
    return Case(
        f"linear.{name}", f"m{rows}", dtype, work, "byte" if few else "flop",
        lambda i: linear(x, packed[i % len(packed)], out), peers,
    )  # fmt: skip


def paged_kv(length: int, slots: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Pool with random keys and values, table int32 `[slots, width]` of scattered units, pages per kv head."""
    pages = -(-length // page_tokens(DIM, dtype))
    units = slots * KV_HEADS * pages + 1
    storage = torch.randn(units, DIM * DIM * 4 // dtype.itemsize).to(dtype).view(torch.uint8)
    table = (torch.randperm(units - 1) + 1).int().view(slots, KV_HEADS * pages)
    return storage, table, pages


def sdpa_peers(batch: int, queries: int, keys: int, dtype: str) -> dict[str, Run]:
    """torch's attention in float32 and, for bfloat16, in that too; causal when there are many queries."""
    operands = [
        torch.randn(batch, heads, n, DIM) for heads, n in ((HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys))
    ]

    def peer(kind: torch.dtype) -> Run:
        q, k, v = (t.to(kind) for t in operands)
        return lambda _: F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, enable_gqa=True)

    kinds = ("float32", "bfloat16") if dtype == "bfloat16" else ("float32",)
    return {f"torch_{kind}": peer(DTYPES[kind]) for kind in kinds}


def prefill_attention_case(kernels: NativeKernels, length: int, dtype: str) -> Case:
    """Causal attention of one prompt."""
    storage, table, pages = paged_kv(length, 1, DTYPES[dtype])
    q, out = torch.randn(length, HEADS * DIM), torch.empty(length, HEADS * DIM)
    peers = sdpa_peers(1, length, length, dtype)
    # Two products over half of the square.
    work = 4 * HEADS * DIM * length * (length + 1) / 2
    return Case(
        "prefill_attention", f"n{length}", dtype, work, "flop",
        lambda _: kernels.prefill_attention(q, storage, table[0], pages, 0, DIM**-0.5, out), peers,
    )  # fmt: skip


def decode_attention_case(kernels: NativeKernels, dtype: str) -> Case:
    """One new token for each of several long requests."""
    storage, table, pages = paged_kv(CACHED, BATCH, DTYPES[dtype])
    q, out = torch.randn(BATCH, HEADS * DIM), torch.empty(BATCH, HEADS * DIM)
    slots, lens = torch.arange(BATCH, dtype=torch.int32), torch.full((BATCH,), CACHED, dtype=torch.int32)
    peers = sdpa_peers(BATCH, 1, CACHED, dtype)
    work = 2 * BATCH * KV_HEADS * CACHED * DIM * DTYPES[dtype].itemsize
    return Case(
        "decode_attention", f"b{BATCH}n{CACHED}", dtype, work, "byte",
        lambda _: kernels.decode_attention(q, storage, table, pages, slots, lens, DIM**-0.5, out), peers,
    )  # fmt: skip


def ssm_params() -> SSMParams:
    """A mixer without window, one state per query head."""
    conv = 0.1 * torch.randn(QKV, 4)
    conv[:, -1] += 1
    angles = torch.zeros(1, DIM // 2)
    bias = torch.cat([torch.linspace(1, 5, HEADS), torch.zeros(HEADS)])
    return SSMParams(conv, bias, torch.ones(HEADS), None, angles, angles, 0, HEADS, KV_HEADS, HEADS, DIM)


def gdn_prefill_case(kernels: NativeKernels, reference: TorchKernels, length: int, dtype: str) -> Case:
    """Gated DeltaNet over one prompt."""
    params, x = ssm_params(), torch.randn(length, QKV + 2 * HEADS + RANK)
    storage = torch.zeros(HEADS + 1, DIM * DIM * 4, dtype=torch.uint8)
    table, tail = torch.arange(1, HEADS + 1, dtype=torch.int32), torch.zeros(3, QKV)
    # Per token and head: decay is free beside k'S, k v' and q'S.
    work = 6 * length * HEADS * DIM * DIM

    def run(backend: TorchKernels) -> Run:
        return lambda _: backend.gdn_prefill(x, params, storage, table, tail, False, 0)

    return Case("gdn_prefill", f"n{length}", dtype, work, "flop", run(kernels), {"reference": run(reference)})


def gdn_decode_case(kernels: NativeKernels, reference: TorchKernels, dtype: str) -> Case:
    """One new token for each of several requests."""
    params, x = ssm_params(), torch.randn(BATCH, QKV + 2 * HEADS + RANK)
    state_bytes = BATCH * HEADS * DIM * DIM * 4
    count = -(-COLD_BYTES // state_bytes)
    storage = torch.zeros(count * BATCH * HEADS + 1, DIM * DIM * 4, dtype=torch.uint8)
    table = torch.arange(1, count * BATCH * HEADS + 1, dtype=torch.int32).view(count * BATCH, HEADS)
    tails = torch.zeros(count * BATCH, 3, QKV)
    slots = [torch.arange(i * BATCH, (i + 1) * BATCH, dtype=torch.int32) for i in range(count)]
    positions = torch.full((BATCH,), CACHED, dtype=torch.int32)

    def run(backend: TorchKernels) -> Run:
        return lambda i: backend.gdn_decode(x, params, storage, table, slots[i % count], tails, positions)

    work = 2 * state_bytes
    return Case("gdn_decode", f"b{BATCH}", dtype, work, "byte", run(kernels), {"reference": run(reference)})


def cases(kernels: NativeKernels, reference: TorchKernels, dtype: str) -> list[Callable[[], Case]]:
    """All cases of one dtype, each made when its turn comes, so that memory holds one at a time."""
    made: list[Callable[[], Case]] = []
    for name in LINEARS:
        rows = [m for m in ROWS if name != "head" or m <= HEAD_ROWS]
        made += [lambda name=name, m=m: linear_case(kernels, name, m, dtype) for m in rows]  # type: ignore[misc]
    made += [lambda n=n: prefill_attention_case(kernels, n, dtype) for n in LENGTHS]  # type: ignore[misc]
    made.append(lambda: decode_attention_case(kernels, dtype))
    # States are float32 and there is no window here: the dtype does not matter.
    if dtype == "float32":
        made += [lambda n=n: gdn_prefill_case(kernels, reference, n, dtype) for n in LENGTHS]  # type: ignore[misc]
        made.append(lambda: gdn_decode_case(kernels, reference, dtype))
    return made


def claims_of(results: list[Result]) -> list[dict[str, Any]]:
    """One ratio per operation, size and dtype; projections as the geometric mean over their shapes."""
    groups: dict[str, list[float]] = {}
    for one in results:
        op, peer = one.op.partition(".")[0], "reference" if one.best_peer == "reference" else "best_torch"
        groups.setdefault(f"cpu.kernel.{op}.{one.dtype}.{one.size}.vs_{peer}", []).append(one.ratio)
    return [
        {"id": name, "value": round(statistics.geometric_mean(ratios), 4), "goal": ">= 1"}
        for name, ratios in groups.items()
    ]


@torch.inference_mode()
def main(
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="bfloat16 or float32; default: both.")] = None,
    only: Annotated[str, typer.Option("--only", help="Cases whose operation starts with this.")] = "",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each call; the median counts.")] = 7,
    budget: Annotated[float, typer.Option("--budget", min=0.0, help="Seconds per call and round.")] = 0.1,
    results: Annotated[Path, typer.Option("--results", help="Folder for the JSON file.")] = RESULTS,
) -> None:
    """Compare the native CPU kernels with torch."""
    torch.manual_seed(0)
    table = Table("operation", "size", "dtype", "unit", "Morph", "peers", "ratio", title="Rates in 1e9 per second")
    found: list[Result] = []
    gemm = {}
    for name in dtype or DTYPES:
        if name not in DTYPES:
            raise typer.BadParameter(f"dtype {name!r} is unknown; use {' or '.join(DTYPES)}", param_hint="--dtype")
        kernels = NativeKernels(load_library(), DTYPES[name], KV_HEADS)
        gemm[name] = kernels.gemm
        for make in cases(kernels, TorchKernels("cpu", DTYPES[name], KV_HEADS), name):
            case = make()
            if not case.op.startswith(only):
                continue
            one = measure(case, rounds, budget)
            found.append(one)
            peers = ", ".join(f"{peer} {rate}" for peer, rate in one.rate.items() if peer != "morph")
            table.add_row(one.op, one.size, one.dtype, one.unit, str(one.rate["morph"]), peers, f"{one.ratio:.2f}")
    if not found:
        raise typer.BadParameter(f"no operation starts with {only!r}", param_hint="--only")
    Console(width=140).print(table)
    content = {
        **header(),
        "threads": torch.get_num_threads(),
        "prefill_gemm": gemm,
        "results": [asdict(one) for one in found],
        "claims": claims_of(found),
    }
    Console().print(f"written to {write_results(results, 'cpu_kernels', content)}")


if __name__ == "__main__":
    typer.run(main)
