"""`morph pull`: download a model."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def pull(
    name: Annotated[
        str, typer.Argument(metavar="NAME[@REVISION]", help="For example smollm2-135m or smollm2-135m@r1.")
    ],
    source: Annotated[str, typer.Option("--source", help="Where from; auto = the first that has it.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Download again even when it is here.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Download a model and print the folder it lies in.

    [bold]Example[/bold]: morph pull smollm2-135m@r1
    """
    from morph import hub

    base, _, revision = name.partition("@")
    folder = hub.pull(base, revision=revision or None, source=source, force=force, progress=not quiet)
    typer.echo(folder)
