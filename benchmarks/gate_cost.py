"""The gates' share of prefill time in the engine: the running sums of every block's input, and the decisions.

    python -m benchmarks.gate_cost

Real text of 64, 512 and 2,000 tokens, one prompt at a time, in both dtypes, at budget 1 (all attention, the gates run
all the same) and at the default budget. Timers sit around the two calls that exist for the gates alone; the share is
their time over that of the whole prefill step, head and sampling of the first token included. As a check from outside,
prompts with and without those two calls take turns, and the difference of the median times is reported beside it.
Timing needs a quiet machine; about two minutes on two cores.
"""

from __future__ import annotations

import gzip
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.claims import RESULTS
from benchmarks.report import header, write_results
from morph import LLM, SamplingParams
from morph.engine.engine import Engine

SPEECHES = Path(__file__).parent / "data" / "us_presidential_speeches.txt.gz"
LENGTHS = (64, 512, 2000)
DTYPES = ("bfloat16", "float32")
BUDGETS = (1.0, 0.5)
GOAL = 0.01


@dataclass
class Clock:
    """Seconds spent inside the calls that it wraps."""

    seconds: float = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


@dataclass(frozen=True)
class Step:
    """One prompt's prefill, seconds; and how many blocks it ran with attention."""

    total: float
    sums: float
    decisions: float
    attention_blocks: int


def prefill(engine: Engine, prompt: list[int], params: SamplingParams, sums: Clock, decisions: Clock) -> Step:
    """Run one prompt up to its first token and read the clocks."""
    request = engine.make_request("gate-cost", prompt, params)
    engine.add(request)
    sums.seconds = decisions.seconds = 0.0
    begin = time.perf_counter()
    while not engine.idle:
        engine.step()
    total = time.perf_counter() - begin
    if request.error or request.num_tokens != len(prompt) + 1:
        raise RuntimeError(f"prefill of {len(prompt)} tokens failed: {request.error}")
    layout = request.layout(engine.config.num_blocks)
    return Step(total, sums.seconds, decisions.seconds, str(layout).count("1"))


@contextmanager
def timed_gates(engine: Engine, budget: float, sums: Clock, decisions: Clock) -> Iterator[None]:
    """Put the clocks around the running sums and around the decisions of one budget's policy."""
    policy: Any = engine.make_request("probe", [1], SamplingParams(max_tokens=1, attention_budget=budget)).policy
    runner: Any = engine.runner
    runner.sum_tokens, policy.decide = sums.around(runner.sum_tokens), decisions.around(policy.decide)
    try:
        yield
    finally:
        del runner.sum_tokens, policy.decide


@contextmanager
def without_sums(engine: Engine) -> Iterator[None]:
    """An engine that keeps no running sums, for requests whose layout is given."""
    runner: Any = engine.runner
    runner.sum_tokens = lambda request, block, rows: runner.sums[request.slot, block]
    try:
        yield
    finally:
        del runner.sum_tokens


def measure(engine: Engine, prompts: Sequence[list[int]], budget: float) -> dict[str, Any]:
    """Medians over prompts of one length; the first prompt warms up and is not counted."""
    sums, decisions = Clock(), Clock()
    auto = SamplingParams(max_tokens=1, layout="auto", attention_budget=budget, ignore_eos=True)
    gated, bare = [], []
    for prompt in prompts:
        with timed_gates(engine, budget, sums, decisions):
            request = prefill(engine, prompt, auto, sums, decisions)
        # The same layout by name: the same mixers run, and nothing for the gates.
        probe = engine.make_request("layout", prompt, auto)
        engine.add(probe)
        while not engine.idle:
            engine.step()
        layout = str(probe.layout(engine.config.num_blocks))
        with without_sums(engine):
            named = SamplingParams(max_tokens=1, layout=layout, ignore_eos=True)
            bare.append(prefill(engine, prompt, named, Clock(), Clock()))
        gated.append(request)
    gated, bare = gated[1:], bare[1:]
    total = statistics.median(step.total for step in gated)
    plain = statistics.median(step.total for step in bare)
    parts = {
        "sums_ms": statistics.median(step.sums for step in gated) * 1e3,
        "decisions_ms": statistics.median(step.decisions for step in gated) * 1e3,
        "prefill_ms": total * 1e3,
        "prefill_without_gates_ms": plain * 1e3,
    }
    return {
        "share": round(statistics.median((step.sums + step.decisions) / step.total for step in gated), 5),
        "share_from_outside": round(1 - plain / total, 5),
        "attention_blocks": statistics.mean(step.attention_blocks for step in gated),
        **{name: round(value, 4) for name, value in parts.items()},
    }


def texts(llm: LLM, length: int, count: int) -> list[list[int]]:
    """Consecutive windows of the sample speeches."""
    with gzip.open(SPEECHES, "rt", encoding="utf-8") as file:
        tokens = llm.tokenizer.encode(file.read().replace("<|doc|>", "\n"), add_special_tokens=False)
    return [tokens[i * length : (i + 1) * length] for i in range(count)]


def claims_of(cases: Sequence[dict[str, Any]], revision: str) -> list[dict[str, Any]]:
    """The largest share of all cases, and of each prompt length."""
    shares = {"": max(case["share"] for case in cases)}
    for length in sorted({case["prompt_tokens"] for case in cases}):
        shares[f".tokens{length}"] = max(case["share"] for case in cases if case["prompt_tokens"] == length)
    prefix = f"model.{revision}.gate_cost_share"
    return [{"id": prefix + name, "value": value, "goal": f"<= {GOAL}"} for name, value in shares.items()]


def main(
    model: Annotated[str, typer.Option("--model", help="Name or folder.")] = "smollm2-135m",
    lengths: Annotated[list[int] | None, typer.Option("--tokens", help="Prompt length; repeatable.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Prompts per case that count.")] = 9,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Default: torch's choice.")] = None,
    results: Annotated[Path, typer.Option("--results", help="Folder for the JSON file.")] = RESULTS,
) -> None:
    """Measure what the gates cost in prefill."""
    if threads is not None:
        torch.set_num_threads(threads)
    table = Table(
        "dtype", "tokens", "budget", "attention", "prefill ms", "sums ms", "decide ms", "share", "from outside",
        title="The gates' share of prefill",
    )  # fmt: skip
    cases: list[dict[str, Any]] = []
    for dtype in DTYPES:
        llm = LLM(model, dtype=dtype, max_requests=1, max_context=max(*(lengths or LENGTHS), 64) + 64)  # type: ignore[arg-type]
        for length in lengths or LENGTHS:
            prompts = texts(llm, length, repeats + 1)
            for budget in BUDGETS:
                case = measure(llm.engine, prompts, budget)
                cases.append({"dtype": dtype, "prompt_tokens": length, "budget": budget, **case})
                table.add_row(
                    dtype, str(length), str(budget), f"{case['attention_blocks']:.1f}", f"{case['prefill_ms']:.2f}",
                    f"{case['sums_ms']:.3f}", f"{case['decisions_ms']:.3f}", f"{case['share']:.2%}",
                    f"{case['share_from_outside']:.2%}",
                )  # fmt: skip
        kernels, revision = llm.engine.runner.kernels.name, str(llm.source.meta.get("revision"))
        del llm
    Console().print(table)
    content = {
        **header(),
        "threads": torch.get_num_threads(),
        "kernels": kernels,
        "repeats": repeats,
        "cases": cases,
        "claims": claims_of(cases, revision),
    }
    Console().print(f"written to {write_results(results, 'gate_cost', content)}")


if __name__ == "__main__":
    typer.run(main)
