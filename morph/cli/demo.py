"""`morph demo`: watch a model choose layouts."""

from __future__ import annotations

from typing import Annotated

import typer

from morph.cli.options import BudgetOption, DtypeOption, MemoryOption, engine_config

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

DEFAULT_MODEL = "smollm2-135m"
CONTEXT = 4096
"""Enough for the longest prompt; keeps the memory for eight requests small."""

NEXT = """
Serve it:  make serve        (or: morph serve {model})
           curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
             -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
Chat:      morph chat {model}"""


@app.command()
def demo(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A name, a model folder or a .gguf file.")
    ] = DEFAULT_MODEL,
    layout: Annotated[str, typer.Option("--layout", help="auto, attention, ssm or one 0/1 per block.")] = "auto",
    budget: BudgetOption = None,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of panels, as in a log.")] = False,
    dtype: DtypeOption = "bfloat16",
    memory: MemoryOption = None,
) -> None:
    """Answer eight prompts of different kinds at the same time and show the layout of each.

    [bold]Example[/bold]: morph demo smollm2-135m --budget 0.3
    """
    from rich.console import Console

    from morph.cli import loading
    from morph.cli.display import is_plain
    from morph.demo.prompts import prompts
    from morph.demo.run import run

    console = Console(highlight=False)
    plain = plain or is_plain(console)
    if plain:
        # A log has no width of its own; the table's rows should not be broken.
        console = Console(highlight=False, width=120)
    chosen = prompts()
    engine = loading.load_engine(model, engine_config(dtype, memory, CONTEXT, max_requests=len(chosen), budget=budget))
    engine.start()
    try:
        layouts = [layout] * len(chosen)
        if layout == "auto" and not engine.has_gates:
            console.print(
                "This model has no gates yet, so the demo names the layouts itself: attention, ssm, every other block.",
                style="yellow",
            )
            blocks = engine.config.num_blocks
            named = ("attention", "ssm", "".join("10"[block % 2] for block in range(blocks)))
            layouts = [named[number % len(named)] for number in range(len(chosen))]
        run(engine, chosen, layouts, budget, console, plain)
    finally:
        engine.stop()
    typer.echo(NEXT.format(model=model, name=engine.model_name))
