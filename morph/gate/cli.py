"""`morph gate`: fit and inspect the gates of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from morph.cli.options import BudgetOption, DtypeOption, ModelArgument

app = typer.Typer(add_completion=False, rich_markup_mode="rich", no_args_is_help=True)

DataOption = Annotated[
    Path | None,
    typer.Option("--data", help="Prompts: a folder with train/, prompts/ and corpus/, or a JSON-lines file."),
]
RequestsOption = Annotated[
    Path | None,
    typer.Option("--requests", help="Requests with the base's answers (.npz), instead of --data."),
]
DeviceOption = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where the model runs.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="New folder for a copy of the model with the result; default: in place.")
]


@app.callback()
def gate() -> None:
    """Fit and inspect the gates of a model.

    [bold]Example[/bold]: morph gate inspect smollm2-135m
    """


@app.command()
def fit(
    model: ModelArgument,
    data: DataOption = None,
    requests: RequestsOption = None,
    prompts: Annotated[
        int | None,
        typer.Option("--prompts", min=1, help="Prompts to fit on; default: 3000, or all, or what the limit allows."),
    ] = None,
    work: Annotated[
        Path | None, typer.Option("--work", help="Folder of intermediate results; a stopped run goes on from it.")
    ] = None,
    out: OutOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    limit_seconds: Annotated[
        float | None, typer.Option("--limit-seconds", min=0, help="Stop in time; run again with --work to go on.")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option("--batch-tokens", min=1, help="Padded tokens per pass; default by device.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts, answers and layouts.")] = 0,
) -> None:
    """Fit gates: measure what layouts cost real prompts, regress, calibrate, write the gates into the model's folder.

    The base answers every prompt; a layout's loss is KL(base || model) over that answer. Needs a GPU for thousands
    of prompts; some dozens run on a CPU.

    [bold]Example[/bold]: morph gate fit smollm2-135m --data prompts.jsonl --work work --out smollm2-mine

    [bold]Example[/bold]: morph gate fit ./model --requests requests.npz --work work --device cuda --limit-seconds 500
    """
    from morph.gate.command import FitOptions, fit_command

    fit_command(
        FitOptions(model, data, requests, prompts, work, out, device, dtype, limit_seconds, batch_tokens, seed),
        log=lambda text: typer.echo(text, err=True),
    )


@app.command()
def inspect(
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="A user message; show what its gates say. Repeatable.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts as plain text, without the chat format.")] = False,
    budget: BudgetOption = None,
    dtype: DtypeOption = "bfloat16",
) -> None:
    """Show û per block and kind of prompt as recorded at fit time, τ by budget; with prompts, their û and bits.

    [bold]Example[/bold]: morph gate inspect smollm2-135m --prompt "What is 17 * 23?" --budget 0.3
    """
    from morph.gate.inspect import inspect_command

    inspect_command(model, prompt or [], raw, 0.5 if budget is None else budget, dtype)
