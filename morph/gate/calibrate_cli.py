"""`morph calibrate`: measure the cost table of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from morph.cli.options import DtypeOption, ModelArgument
from morph.gate.cli import DataOption, DeviceOption, OutOption, RequestsOption

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def calibrate(
    model: ModelArgument,
    data: DataOption = None,
    requests: RequestsOption = None,
    prompts: Annotated[int, typer.Option("--prompts", min=2, help="Prompts that τ is calibrated on.")] = 48,
    longest: Annotated[
        int | None, typer.Option("--longest", min=32, help="Longest timed prompt; default: 4096 or the context.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests that share a decode step.")] = 8,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed runs per length; the best counts.")] = 5,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Rounds of letting the gates choose under refined thresholds.")
    ] = 1,
    answer_tokens: Annotated[
        float | None, typer.Option("--answer-tokens", min=0, help="Mean answer; default: the requests', or as before.")
    ] = None,
    out: OutOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "bfloat16",
    seed: Annotated[int, typer.Option("--seed", help="Of drawn prompts.")] = 0,
) -> None:
    """Time both mixers on this machine, write the cost table, and calibrate τ of every budget anew.

    Layouts depend on the table, so it is never made at start: run this once, on a quiet machine. An
    attention_budget then stands for seconds of this machine.

    [bold]Example[/bold]: morph calibrate smollm2-135m --data prompts.jsonl --out smollm2-here
    """
    from morph.gate.recalibrate import CalibrateOptions, calibrate_command

    calibrate_command(
        CalibrateOptions(
            model, data, requests, prompts, longest, batch, repeats, rounds, answer_tokens, out, device, dtype, seed
        ),
        log=lambda text: typer.echo(text, err=True),
    )
