"""`morph eval` after its options are read: run, summarise, write JSON, Markdown and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from morph.evaluate.plan import Options
from morph.evaluate.plots import draw_all
from morph.evaluate.run import run_evaluation
from morph.evaluate.store import write_json
from morph.evaluate.summary import summarise
from morph.evaluate.tables import all_tables, markdown

RESULTS, PAGE = "results.json", "results.md"


def evaluate(options: Options, console: Console) -> dict[str, Any]:
    """Run an evaluation, or what is left of it, and write `results.json`, `results.md` and `plots/` to its folder.

    Returns:
        The summary.
    """
    evaluation = run_evaluation(options, note=lambda text: console.print(text, style="dim", highlight=False))
    summary = summarise(evaluation)
    folder = options.out
    write_json(folder / RESULTS, summary)
    plots = write_plots(summary, folder / "plots")
    (folder / PAGE).write_text(markdown(summary, plots), encoding="utf-8")
    return summary


def write_plots(summary: dict[str, Any], folder: Path) -> dict[str, str]:
    """SVG files; returns title -> file name relative to the folder above."""
    folder.mkdir(exist_ok=True)
    files = {}
    for name, (title, svg) in draw_all(summary).items():
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
        files[title] = f"plots/{name}.svg"
    return files


def show(summary: dict[str, Any], console: Console) -> None:
    """The tables in the terminal."""
    for table in all_tables(summary)[:-1]:  # the operations by part are the same for every run
        console.print(table.rich())
        if table.about:
            console.print(table.about.replace("`", ""), style="dim", highlight=False)
        console.print()
