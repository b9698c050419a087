"""The command table. A command's module is imported when the command runs, so that `--help` stays quick."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from morph.errors import InvalidRequest, ModelNotFound, MorphError

COMMANDS = {
    "pull": ("morph.cli.pull", "Download a model."),
    "info": ("morph.cli.info", "Describe a model."),
    "chat": ("morph.cli.chat", "Talk to a model in the terminal."),
    "serve": ("morph.cli.serve", "Serve a model over HTTP, OpenAI-compatible."),
    "demo": ("morph.cli.demo", "Watch a model choose a layout per prompt, side by side."),
    "convert": ("morph.convert.cli", "Make a Morph model of an attention model."),
    "distill": ("morph.train.cli", "Train the SSM mixers of a converted model."),
    "gate": ("morph.gate.cli", "Fit and inspect the gates of a model."),
    "calibrate": ("morph.gate.calibrate_cli", "Measure the cost table of this machine."),
    "eval": ("morph.evaluate.cli", "Measure the quality of a model."),
    "report": ("morph.evaluate.report_cli", "Write one page from results: claims, tables, plots."),
    "bench": ("morph.bench.cli", "Measure the speed of a model."),
}
"""Name -> module with a typer app named `app`, and the line in `morph --help`; a module that is not there is
left out."""


class LazyGroup(TyperGroup):
    """Lists commands from the table and imports one only to run it or to show its own help."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for name, (module, line) in COMMANDS.items():
            if _exists(module):
                self.commands[name] = TyperCommand(name=name, help=line)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the table."""
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command in place of its line in the table."""
        name = args[0] if args else ""
        if name in self.commands and name in COMMANDS:
            module = importlib.import_module(COMMANDS[name][0])
            return name, typer.main.get_command(module.app), args[1:]
        return super().resolve_command(ctx, args)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


app = typer.Typer(
    cls=LazyGroup,
    name="morph",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"morph {version('morph')}")
        except PackageNotFoundError:
            typer.echo("morph (not installed)")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (also MORPH_DEBUG=1).")] = False,
) -> None:
    """Serve hybrid language models whose attention/SSM layout is chosen per request.

    [bold]Example[/bold]: morph pull smollm2-135m && morph chat smollm2-135m
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for wrong usage or input, 1 for everything else.

    Args:
        args: words after `morph`; None = this process's.
    """
    words = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in words or os.environ.get("MORPH_DEBUG") == "1"
    # Accepted anywhere, since one adds it to the end of the line that has just failed.
    words = [word for word in words if word != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        # A model may say what the terminal's encoding does not have.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(args=words, prog_name="morph")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except MorphError as error:
        if debug:
            raise
        print(f"morph: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest | ModelNotFound) else 1
    return 0
