"""Measuring serving: rounds over targets and rows, their figures, and the table that shows them."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.client import Timing, summarise
from benchmarks.processes import Watch
from benchmarks.targets import Session, Target
from benchmarks.workload import Prompts, Workload

Figures = Mapping[str, float]
Rows = Mapping[tuple[str, str], Figures]
"""Target and workload name -> figures."""


def measure(session: Session, workload: Workload, prompts: Prompts) -> dict[str, Any]:
    """Warm up, then time one row: its figures, and every request's times."""
    session.run(prompts.warmup, workload.output_tokens, workload.concurrency)
    load = os.getloadavg()[0]
    if session.pid is None:
        timings = session.run(prompts.timed, workload.output_tokens, workload.concurrency)
        watched: dict[str, float] = {}
    else:
        with Watch(session.pid) as watch:
            timings = session.run(prompts.timed, workload.output_tokens, workload.concurrency)
        watched = {
            "peak_memory_gb": watch.peak_bytes / 1e9,
            "server_cores": watch.server_cores,
            "client_cores": watch.client_cores,
            "other_cores": watch.other_cores,
        }
    figures = {
        **summarise(timings),
        **watched,
        "load_1m_before": load,
        **_attention_blocks(timings),
    }
    return {"figures": figures, "requests": [_request(timing) for timing in timings]}


def _attention_blocks(timings: Sequence[Timing]) -> dict[str, float]:
    """Mean number of attention blocks of the layouts that Morph reports."""
    counts = [t.morph["attention_blocks"] for t in timings if t.morph and "attention_blocks" in t.morph]
    return {"attention_blocks_mean": statistics.fmean(counts)} if counts else {}


def _request(timing: Timing) -> dict[str, Any]:
    seconds = {"ttft_s": timing.ttft, "tpot_s": timing.tpot, "e2e_s": timing.e2e}
    return {**seconds, "morph": timing.morph} if timing.morph else seconds


def median_figures(rounds: Sequence[Figures]) -> dict[str, float]:
    """Median over the rounds, figure by figure."""
    return {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}


def run_rounds(
    targets: Sequence[Target],
    work: Sequence[tuple[Workload, Prompts]],
    rounds: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measure all rows on all targets: one target up at a time, the targets in turn, `rounds` times.

    Returns:
        One entry per target and row: what was asked, the median figures, and each round's measurement.
    """
    measured: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for number in range(1, rounds + 1):
        for target in targets:
            say(f"round {number}/{rounds}: starting {target.name}")
            with target.open() as session:
                for workload, prompts in work:
                    result = measure(session, workload, prompts)
                    measured[target.name, workload.name].append(result)
                    speed = result["figures"]["total_tokens_per_s"]
                    say(f"  {target.name} {workload.name}: {speed:.1f} tokens/s")
    return [
        {
            "target": target.name,
            "workload": workload.name,
            **asdict(workload),
            "figures": median_figures([entry["figures"] for entry in measured[target.name, workload.name]]),
            "rounds": measured[target.name, workload.name],
        }
        for workload, _ in work
        for target in targets
    ]


COLUMNS = (
    ("total tok/s", "total_tokens_per_s", 1, ".1f"),
    ("out tok/s", "output_tokens_per_s", 1, ".1f"),
    ("ttft p50 s", "ttft_p50_s", 1, ".2f"),
    ("p99", "ttft_p99_s", 1, ".2f"),
    ("tpot p50 ms", "tpot_p50_s", 1000, ".1f"),
    ("p99", "tpot_p99_s", 1000, ".1f"),
    ("peak GB", "peak_memory_gb", 1, ".2f"),
    ("attn blocks", "attention_blocks_mean", 1, ".1f"),
    ("other cores", "other_cores", 1, ".2f"),
)
"""Heading, figure, factor and format."""


def figures_table(title: str, rows: Rows) -> Table:
    """The measured rows, in their order (workload by workload), as a table for the terminal."""
    table = Table("in/out", "target", title=title)
    for heading, *_ in COLUMNS:
        table.add_column(heading, justify="right")
    previous = None
    for (target, workload), figures in rows.items():
        if workload != previous and previous is not None:
            table.add_section()
        cells = []
        for _, key, factor, form in COLUMNS:
            value = figures.get(key)
            cells.append("–" if value is None else format(value * factor, form))
        table.add_row("" if workload == previous else workload.replace("x", "/"), target, *cells)
        previous = workload
    return table
