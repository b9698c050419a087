"""`morph chat`: talk to a model in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from morph.cli.options import (
    BudgetOption,
    DtypeOption,
    MaxContextOption,
    MemoryOption,
    ModelArgument,
    engine_config,
)

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    layout: Annotated[str, typer.Option("--layout", help="auto, attention, ssm or one 0/1 per block.")] = "auto",
    budget: BudgetOption = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0 = greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option("--top-p", min=0, max=1)] = 0.95,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes answers reproducible.")] = None,
    dtype: DtypeOption = "bfloat16",
    memory: MemoryOption = None,
    max_context: MaxContextOption = None,
) -> None:
    """Talk to a model; each turn shows the layout that the gates chose.

    Lines from a pipe are turns, too; then stdout has the answers alone.

    [bold]Example[/bold]: morph chat smollm2-135m --budget 0.3

    [bold]Example[/bold]: echo "What is an inode?" | morph chat smollm2-135m
    """
    from morph.cli import loading
    from morph.cli.session import ChatSession, run
    from morph.engine.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        layout=layout,
        attention_budget=budget,
    )
    engine = loading.load_engine(model, engine_config(dtype, memory, max_context, max_requests=1))
    engine.start()
    try:
        run(ChatSession(engine, params, system), interactive=sys.stdin.isatty())
    finally:
        engine.stop()
