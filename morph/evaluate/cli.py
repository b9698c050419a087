"""`morph eval`: measure the quality of a model, layout by layout, beside what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from morph.cli.options import DtypeOption, MaxRequestsOption, MemoryOption, ModelArgument

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

SuiteName = Literal["quick", "six", "six-short", "six-long", "long"]


def parse_lengths(text: str) -> tuple[int, int]:
    """`2000-6000` as two numbers.

    Raises:
        typer.BadParameter: anything else.
    """
    low, dash, high = text.partition("-")
    if not (dash and low.isdigit() and high.isdigit()) or not 64 <= int(low) <= int(high):
        raise typer.BadParameter(f"{text!r} is no range of tokens; use for example 2000-6000")
    return int(low), int(high)


@app.command()
def evaluate(
    model: ModelArgument,
    suite: Annotated[
        SuiteName, typer.Option("--suite", help="Sets to run; quick needs no data and takes minutes.")
    ] = "quick",
    layouts: Annotated[
        str | None,
        typer.Option(
            "--layouts",
            help="Comma-separated: attention, ssm, auto:B, static:B, shuffled:B, alternating, nemotron[:BLOCKS], "
            "random[:SHARE], oracle[:ITEMS], or 0/1 per block. Default: by suite.",
        ),
    ] = None,
    datasets: Annotated[str | None, typer.Option("--datasets", help="Only these sets, comma-separated.")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder with the sets as JSON lines (docs/evaluation.md).")
    ] = None,
    hub: Annotated[bool, typer.Option("--hub", help="Download the sets from the Hugging Face hub.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Items at most of each set.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of results; run again with the same one to go on.")] = Path(
        "eval-results"
    ),
    ranking: Annotated[
        str | None,
        typer.Option("--ranking", help="Blocks for static layouts, most sensitive first, or a JSON file with them."),
    ] = None,
    lengths: Annotated[str | None, typer.Option("--lengths", help="Tokens of the long forms, e.g. 2000-6000.")] = None,
    longest: Annotated[
        int | None, typer.Option("--longest", min=256, help="Prompt and answer tokens at most; default: the context.")
    ] = None,
    answer_loss: Annotated[
        bool, typer.Option("--answer-loss", help="Score the base's written answers under every layout, too.")
    ] = False,
    dtype: DtypeOption = "bfloat16",
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where the model runs.")] = "cpu",
    max_requests: MaxRequestsOption = 16,
    memory: MemoryOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Of examples, lengths, random and shuffled layouts.")] = 0,
) -> None:
    """Measure quality against cost: layouts on reasoning, questions, summaries and recall, with 95 % intervals.

    Writes results.json, results.md and plots to --out. Finished items are kept: after a stop, the same command goes
    on.

    [bold]Example[/bold]: morph eval smollm2-135m

    [bold]Example[/bold]: morph eval smollm2-135m --suite six --data ./data --layouts attention,ssm,auto:0.5,static:0.5
    """
    from rich.console import Console

    from morph.evaluate.command import evaluate as run
    from morph.evaluate.command import show
    from morph.evaluate.plan import Options

    options = Options(
        model=model,
        suite=suite,
        datasets=tuple(name.strip() for name in (datasets or "").split(",") if name.strip()),
        layouts=layouts,
        data=data,
        hub=hub,
        out=out,
        limit=limit,
        lengths=None if lengths is None else parse_lengths(lengths),
        ranking=ranking,
        longest=longest,
        dtype=dtype,
        device=device,
        max_requests=max_requests,
        memory_bytes=memory,
        seed=seed,
        answer_loss=answer_loss,
    )
    errors = Console(stderr=True)
    try:
        summary = run(options, errors)
    except KeyboardInterrupt:
        errors.print(f"stopped; finished items are kept in {out}: run the same command again to go on")
        raise typer.Exit(130) from None
    terminal = Console()
    show(summary, terminal if terminal.is_terminal else Console(width=160))
    typer.echo(f"written to {out}/results.json, {out}/results.md and {out}/plots")
