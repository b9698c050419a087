"""Speed of training on one GPU: token passes per second in alignment and in distillation, as `morph distill` runs them.

    python -m benchmarks.train_speed CONVERTED_MODEL

Steps of the default sizes over random token ids, compiled, with optimiser; the first ones, which compile, are left out.
A token pass is one token under one layout. With `--profile DIR` the operations of two steps of each kind are listed
there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.claims import RESULTS
from benchmarks.report import header, write_results
from morph.train.config import load_config
from morph.train.gradcheck import require_right_gradients
from morph.train.graphs import CapturedStep
from morph.train.layouts import free_blocks, step_layouts
from morph.train.model import mixer_parameters, open_converted, training_model
from morph.train.optimizer import MixerOptimizer
from morph.train.steps import align, distill
from morph.train.trunk import Trunk

GOALS = {"align": 300_000, "distill": 200_000}


def timed(step: Callable[[], None], warm_up: int, steps: int) -> float:
    """Median seconds of a step."""
    for _ in range(warm_up):
        step()
    seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]


def profiled(step: Callable[[], None], path: Path) -> None:
    """Write the operations of two steps, most expensive first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    averages = profile.key_averages()
    text = averages.table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=90)
    text += averages.table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60)
    path.write_text(text)


def main(
    model: Annotated[Path, typer.Argument(help="A folder made by `morph convert`.")],
    steps: Annotated[int, typer.Option(help="Timed steps of each kind.")] = 12,
    warm_up: Annotated[int, typer.Option(help="Steps before them.")] = 4,
    lengths: Annotated[str, typer.Option(help="Sequence lengths of distillation.")] = "1024,4096,8192",
    profile: Annotated[Path | None, typer.Option(help="Folder for operation tables.")] = None,
    micro_tokens: Annotated[int, typer.Option(help="Most token passes at once in distillation.")] = 131_072,
    name: Annotated[str, typer.Option(help="Name of the result file.")] = "train_speed",
    results: Annotated[Path, typer.Option(help="Folder for it.")] = RESULTS,
) -> None:
    """Measure and write `NAME.json`."""
    config = load_config()
    device = torch.device("cuda")
    source, base = open_converted(model)
    trained = training_model(source, base, torch.bfloat16, device)
    shape = source.config
    assert shape.ssm is not None
    check = require_right_gradients(
        device, shape.num_heads, shape.head_dim, shape.num_kv_heads, torch.bfloat16, shape.ssm.window
    )
    Console().print(f"gradients: {check}")
    trunk = Trunk(trained, compiled=True, layouts=shape)
    parameters = mixer_parameters(trained)
    rng = torch.Generator().manual_seed(0)
    rows: list[dict[str, Any]] = []

    def report(stage: str, length: int, passes: int, seconds: float) -> None:
        row: dict[str, Any] = {"stage": stage, "length": length, "passes_per_step": passes, "step_seconds": seconds}
        row["passes_per_second"] = passes / seconds
        row["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        rows.append(row)
        Console().print(f"{stage} at {length}: {seconds * 1e3:.1f} ms a step, {passes / seconds:,.0f} passes/s")
        torch.cuda.reset_peak_memory_stats()

    def tokens(count: int, length: int) -> torch.Tensor:
        return torch.randint(shape.vocab_size, (count // length, length), generator=rng).to(device)

    optimizer = MixerOptimizer(parameters, config.align)
    length = config.align.length(0)
    batch = tokens(config.align.tokens_per_step, length)
    captured: CapturedStep | None = CapturedStep(lambda part: align(trunk, part, 1.0), batch)

    def align_step() -> None:
        optimizer.zero()
        assert captured is not None
        captured(batch)
        optimizer.step(1e-5)

    report("align", length, config.align.tokens_per_step, timed(align_step, warm_up, steps))
    if profile is not None:
        profile.mkdir(parents=True, exist_ok=True)
        profiled(align_step, profile / "align.txt")
    captured = None  # its memory
    optimizer = MixerOptimizer(parameters, config.distill)
    ranking = free_blocks(shape)
    count = config.distill.layouts
    for length in map(int, lengths.split(",")):
        micro = tokens(micro_tokens // count, length)
        passes = config.distill.tokens_per_step
        parts = passes // micro_tokens
        draw = iter(range(1_000_000))

        def distill_step(micro: torch.Tensor = micro, parts: int = parts, draw: Iterator[int] = draw) -> None:
            optimizer.zero()
            layouts = step_layouts(shape, count, ranking, np.random.default_rng(next(draw)))
            for _ in range(parts):
                distill(
                    trunk, micro, None, layouts, 1 / parts, config.distill.kl_chunk,
                    config.distill.hidden_weight, config.distill.hidden_every,
                )  # fmt: skip
            optimizer.step(1e-5)

        report("distill", length, passes, timed(distill_step, warm_up, steps))
        if profile is not None:
            profiled(distill_step, profile / f"distill-{length}.txt")
    table = Table("stage", "length", "ms a step", "passes/s", "peak GB")
    for row in rows:
        table.add_row(
            str(row["stage"]), str(row["length"]), f"{row['step_seconds'] * 1e3:.1f}",
            f"{row['passes_per_second']:,.0f}", f"{row['memory_gb']:.1f}",
        )  # fmt: skip
    Console().print(table)
    claims = []
    for stage, goal in GOALS.items():
        value = next((r["passes_per_second"] for r in rows if r["stage"] == stage), None)
        if value is not None:
            claims.append({"id": f"model.train.{stage}.passes_per_s", "value": value, "goal": f">= {goal}"})
    gpu = {"gpu": torch.cuda.get_device_name(), "fla": check is not None}
    path = write_results(results, name, header() | {"device": gpu, "rows": rows, "claims": claims})
    Console().print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
