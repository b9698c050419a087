"""`morph info`: describe a model."""

from __future__ import annotations

from typing import Annotated

import typer

from morph.cli.options import ModelArgument

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def info(
    model: ModelArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Describe a model: its shape, its parts and where they come from.

    [bold]Example[/bold]: morph info smollm2-135m
    """
    import dataclasses
    import json

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from morph import hub

    facts = dataclasses.asdict(hub.info(hub.resolve_model(model)))
    if as_json:
        typer.echo(json.dumps(facts, indent=2, default=str))
        return
    table = Table(box=None, show_header=False)
    for name, value in _flat(facts):
        table.add_row(Text(name, style="bold"), Text(value))
    Console(highlight=False).print(table)


def _flat(facts: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Name and text of every fact; nested names are joined with dots, unknown ones left out."""
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            rows.append((prefix + name, ", ".join(str(item) for item in value)))
        elif value is not None:
            rows.append((prefix + name, str(value)))
    return rows
