"""`morph report`: one HTML page from result files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

DEFAULT_RESULTS = Path("benchmarks/results")


@app.command()
def report(
    evaluations: Annotated[
        list[Path] | None, typer.Option("--eval", help="Folder of a finished `morph eval`; repeatable.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option("--results", help="Folder of benchmark results; default: benchmarks/results where it is."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained page, readable without scripts: claims, the paper's beside them, tables, plots.

    [bold]Example[/bold]: morph report --eval eval-results --out report.html
    """
    from morph.errors import InvalidRequest
    from morph.evaluate.report import build_report

    folder = results if results is not None else DEFAULT_RESULTS if DEFAULT_RESULTS.is_dir() else None
    if folder is not None and not folder.is_dir():
        raise InvalidRequest(f"--results {folder} is no folder; name the one with the JSON files", "results")
    page = build_report(folder, evaluations or [])
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"--out {out} cannot be written ({error.strerror})", "out") from error
    typer.echo(f"written to {out} ({len(page.encode()) / 1e6:.1f} MB)")
