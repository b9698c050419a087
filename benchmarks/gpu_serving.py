"""Serving on a CUDA machine under Poisson arrivals, up to the knee, through the HTTP server.

    python -m benchmarks.gpu_serving --model smollm2-135m
    python -m benchmarks.gpu_serving --url http://127.0.0.1:8000 --name vllm --layouts base

The client is that of the CPU benchmark. The first form starts `morph serve --device cuda` once per layout; the second
drives any OpenAI-compatible endpoint that honours `ignore_eos` (vLLM, SGLang, transformers' server). Prompts are random
token ids, so no prefix cache helps. The knee is the highest rate that is served: answers keep up with arrivals within
5 %, and the median ttft stays below the limit.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.claims import RESULTS
from benchmarks.client import Endpoint, Timing, complete, first_model, summarise
from benchmarks.report import header, write_results
from benchmarks.servers import morph_server, running

KEEPS_UP = 0.95


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of a Poisson process of `rate` per second over `seconds`."""
    rng, at, found = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        found.append(at)
    return found


async def offer(
    endpoint: Endpoint, times: Sequence[float], tokens_in: int, tokens_out: int, vocab: int
) -> list[Timing]:
    """Send one prompt at each time, whatever has been answered by then (open loop)."""
    rng = random.Random(len(times))

    async def one(at: float) -> Timing:
        prompt = [rng.randrange(10, vocab) for _ in range(tokens_in)]
        await asyncio.sleep(at)
        return await complete(endpoint, prompt, tokens_out)

    return list(await asyncio.gather(*(one(at) for at in times)))


def knee(steps: Sequence[dict[str, Any]], ttft_limit_s: float) -> float:
    """Highest offered rate that was served; 0 when none was."""
    served = [
        step["rate"]
        for step in steps
        if step["requests_per_s"] >= KEEPS_UP * step["arrived_per_s"] and step["ttft_p50_s"] <= ttft_limit_s
    ]
    return max(served, default=0.0)


def climb(
    endpoint: Endpoint, rates: Sequence[float], seconds: float, tokens: tuple[int, int], vocab: int, limit: float
) -> list[dict[str, Any]]:
    """Rates in ascending order, until one is not served."""
    asyncio.run(offer(endpoint, [0.1 * i for i in range(8)], *tokens, vocab))
    steps: list[dict[str, Any]] = []
    for rate in rates:
        times = arrivals(rate, seconds, seed=int(rate * 1000))
        if not times:
            continue
        timings = asyncio.run(offer(endpoint, times, *tokens, vocab))
        figures = summarise(timings)
        step = {
            "rate": rate, "requests": len(times), "arrived_per_s": len(times) / seconds,
            # The tail after the last arrival is one answer long at any rate; it is no sign of a queue.
            "requests_per_s": len(times) / max(seconds, figures["wall_s"] - min(t.e2e for t in timings)),
            **figures,
        }  # fmt: skip
        steps.append(step)
        if knee(steps, limit) != rate:
            break
    return steps


def main(
    model: Annotated[str, typer.Option(help="A name or folder that `morph serve` takes.")] = "smollm2-135m",
    url: Annotated[str | None, typer.Option(help="A running server instead of Morph's own.")] = None,
    name: Annotated[str, typer.Option(help="What the result calls the running server.")] = "server",
    layouts: Annotated[
        str, typer.Option(help="attention, ssm, auto, comma separated; base = send none.")
    ] = "attention,auto,ssm",
    tokens: Annotated[str, typer.Option(help="IN/OUT tokens of each request.")] = "1024/128",
    rates: Annotated[str, typer.Option(help="Requests per second, ascending.")] = "2,4,8,16,32,64,128",
    seconds: Annotated[float, typer.Option(help="How long each rate is offered.")] = 20.0,
    ttft_limit: Annotated[float, typer.Option(help="Median ttft at the knee, seconds.")] = 2.0,
    vocab: Annotated[int, typer.Option(help="Prompt tokens are drawn below this id.")] = 32000,
    max_requests: Annotated[int, typer.Option(help="Requests that run at the same time in Morph.")] = 128,
    results: Annotated[Path, typer.Option("--results", help="Folder of result files.")] = RESULTS,
) -> None:
    """Climb to the knee with each layout and write gpu_serving[_NAME].json."""
    tokens_in, tokens_out = map(int, tokens.split("/"))
    offered = [float(rate) for rate in rates.split(",")]
    more = ["--device", "cuda", "--max-requests", str(max_requests)]
    table = Table("layout", "rate", "req/s", "total tok/s", "ttft p50", "ttft p99", "tpot p50 ms")
    runs: dict[str, Any] = {}
    for layout in layouts.split(","):
        extra = {} if layout == "base" else {"morph": {"layout": layout}}
        spec = morph_server(sys.executable, model, "bfloat16", more)
        with running(spec, "morph") if url is None else nullcontext() as server:
            address = url if server is None else server.url
            assert address is not None
            endpoint = Endpoint(address, asyncio.run(first_model(address)), extra)
            steps = climb(endpoint, offered, seconds, (tokens_in, tokens_out), vocab, ttft_limit)
        runs[layout] = {"knee_requests_per_s": knee(steps, ttft_limit), "steps": steps}
        for step in steps:
            table.add_row(
                layout, f"{step['rate']:g}", f"{step['requests_per_s']:.2f}", f"{step['total_tokens_per_s']:.0f}",
                f"{step['ttft_p50_s']:.3f}", f"{step['ttft_p99_s']:.3f}", f"{step['tpot_p50_s'] * 1e3:.1f}",
            )  # fmt: skip
    claims = []
    if {"auto", "attention"} <= runs.keys() and runs["attention"]["knee_requests_per_s"]:
        ratio = runs["auto"]["knee_requests_per_s"] / runs["attention"]["knee_requests_per_s"]
        claims.append({"id": "gpu.serving.knee.auto_vs_attention", "value": ratio, "goal": ">= 1.0"})
    content = {
        "name": "gpu_serving", **header(), "target": "morph" if url is None else name, "model": model,
        "tokens": [tokens_in, tokens_out], "ttft_limit_s": ttft_limit, "runs": runs, "claims": claims,
    }  # fmt: skip
    write_results(results, "gpu_serving" if url is None else f"gpu_serving_{name}", content)
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
