"""The figures of an evaluation, as SVG text: quality over cost, layouts over blocks, counts, kinds of request."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from morph.errors import MorphError

COLOURS = {
    "attention": "#b3541e",
    "ssm": "#1f78b4",
    "auto": "#2a7f3b",
    "static": "#6a51a3",
    "shuffled": "#999999",
    "alternating": "#c99700",
    "nemotron": "#8c564b",
    "random": "#e377c2",
    "chain": "#bcbddc",
    "bits": "#17becf",
}
MARKS = {"attention": "s", "ssm": "s", "auto": "o", "static": "^", "shuffled": "x", "chain": "."}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MorphError("plots need the package `matplotlib`: pip install 'morph-hybrid[eval]'") from error
    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "morph",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    import matplotlib.pyplot as pyplot

    return pyplot


def _kind(name: str) -> str:
    kind = name.partition(":")[0]
    return kind if kind in COLOURS else "bits"


def _svg(figure: Any, pyplot: Any, label: str) -> str:
    """The figure as an `<svg>` element with a label for those who do not see it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r"<svg ", f'<svg role="img" aria-label="{label}" ', text, count=1)


def _panels(names: Sequence[str], pyplot: Any) -> tuple[Any, list[Any]]:
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3.0 * columns, 2.5 * rows), squeeze=False)
    flat = [axis for row in axes for axis in row]
    for axis in flat[len(names) :]:
        axis.set_visible(False)
    return figure, flat


def _quality(summary: dict[str, Any], x: Callable[[dict[str, Any]], float], xlabel: str, label: str) -> str:
    pyplot = _pyplot()
    names = list(summary["sets"])
    figure, axes = _panels(names, pyplot)
    seen: dict[str, Any] = {}
    for name, axis in zip(names, axes, strict=False):
        entry = summary["sets"][name]
        for kind in ("static", "auto"):
            # Points of one kind at several budgets are a curve.
            curve = sorted(
                (x(figures), figures["metrics"][entry["primary"]]["value"])
                for layout, figures in entry["layouts"].items()
                if _kind(layout) == kind
            )
            if len(curve) > 1:
                axis.plot(*zip(*curve, strict=True), color=COLOURS[kind], linewidth=0.8, alpha=0.6)
        for layout, figures in entry["layouts"].items():
            if layout.startswith("chain"):
                continue  # a subset of the items
            estimate = figures["metrics"][entry["primary"]]
            kind = _kind(layout)
            error = [[estimate["value"] - estimate["low"]], [estimate["high"] - estimate["value"]]]
            seen[kind] = axis.errorbar(
                [x(figures)],
                [estimate["value"]],
                yerr=[[max(e[0], 0.0)] for e in error],
                fmt=MARKS.get(kind, "d"),
                color=COLOURS[kind],
                markersize=5,
                elinewidth=0.7,
                capsize=2,
            )
        axis.set_title(name, fontsize=9)
        axis.set_ylabel(entry["primary"])
        axis.set_xlabel(xlabel)
        axis.margins(x=0.1)
    figure.legend(
        seen.values(), seen.keys(), loc="upper center", ncol=len(seen), bbox_to_anchor=(0.5, 1.04), frameon=False
    )
    figure.tight_layout()
    return _svg(figure, pyplot, label)


def quality_over_share(summary: dict[str, Any]) -> str:
    """Primary metric over the share of blocks that run attention, a panel per set."""
    return _quality(
        summary,
        lambda f: 100 * f["attention_share"],
        "attention blocks, %",
        "quality over the share of attention blocks",
    )


def quality_over_flops(summary: dict[str, Any]) -> str:
    """Primary metric over operations per token at the set's own lengths."""
    return _quality(
        summary, lambda f: 1000 * f["tflops_per_token"], "GFLOPs per token", "quality over operations per token"
    )


def layout_heatmap(summary: dict[str, Any]) -> str | None:
    """How often each block runs attention, sets × blocks, one panel per `auto`; None where no gate chose."""
    autos = [name for name in summary["layouts"] if name.startswith("auto")]
    if not autos:
        return None
    pyplot = _pyplot()
    names = list(summary["sets"])
    figure, axes = pyplot.subplots(
        len(autos), 1, figsize=(9, (0.24 * len(names) + 0.9) * len(autos)), squeeze=False, layout="constrained"
    )
    image = None
    for auto, (axis,) in zip(autos, axes, strict=True):
        rates = [summary["sets"][name]["layouts"][auto]["layouts"]["block_rates"] for name in names]
        image = axis.imshow(rates, aspect="auto", vmin=0, vmax=1, cmap="YlOrBr", interpolation="nearest")
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.set_title(auto, fontsize=9)
        axis.set_xlabel("block")
    figure.colorbar(image, ax=axes[:, 0].tolist(), label="runs attention", shrink=0.8)
    return _svg(figure, pyplot, "how often each block runs attention, by set")


def layout_histogram(summary: dict[str, Any]) -> str | None:
    """Requests by their number of attention blocks, one panel per `auto`."""
    autos = [name for name in summary["layouts"] if name.startswith("auto")]
    if not autos:
        return None
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(autos), figsize=(3.2 * len(autos), 2.4), squeeze=False)
    for auto, axis in zip(autos, axes[0], strict=True):
        counts: dict[int, int] = {}
        for entry in summary["sets"].values():
            for blocks, count in entry["layouts"][auto]["layouts"]["attention_counts"].items():
                counts[int(blocks)] = counts.get(int(blocks), 0) + count
        axis.bar(list(counts), list(counts.values()), color=COLOURS["auto"], width=0.9)
        axis.set_xlim(-0.7, summary["blocks"] + 0.7)
        axis.set_title(auto, fontsize=9)
        axis.set_xlabel("attention blocks")
        axis.set_ylabel("requests")
    figure.tight_layout()
    return _svg(figure, pyplot, "requests by their number of attention blocks")


def budget_by_kind(summary: dict[str, Any]) -> str | None:
    """Realised budget of the requests that had a choice, by kind of request and by `auto`."""
    kinds = sorted({kind for groups in summary["by_kind"].values() for kind in groups})
    if not kinds:
        return None
    pyplot = _pyplot()
    autos = list(summary["by_kind"])
    figure, axis = pyplot.subplots(figsize=(1.4 + 1.1 * len(kinds) * max(1, len(autos) / 2), 2.6))
    width = 0.8 / len(autos)
    for number, auto in enumerate(autos):
        values = [summary["by_kind"][auto].get(kind, {}).get("budget", 0.0) for kind in kinds]
        places = [i + (number - (len(autos) - 1) / 2) * width for i in range(len(kinds))]
        axis.bar(places, values, width=width * 0.95, label=auto, color=COLOURS["auto"], alpha=(number + 1) / len(autos))
    axis.set_xticks(range(len(kinds)), kinds)
    axis.set_ylabel("realised budget")
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return _svg(figure, pyplot, "realised budget by kind of request")


PLOTS: dict[str, tuple[str, Callable[[dict[str, Any]], str | None]]] = {
    "quality_over_share": ("Quality over the share of attention blocks", quality_over_share),
    "quality_over_flops": ("Quality over operations per token, at each set's own lengths", quality_over_flops),
    "layout_heatmap": ("Where attention runs: blocks × sets", layout_heatmap),
    "layout_histogram": ("Layouts by their number of attention blocks", layout_histogram),
    "budget_by_kind": ("Realised budget by kind of request", budget_by_kind),
}
"""File name -> title and the function that draws it; None = nothing to draw."""


def draw_all(summary: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Title and SVG of every plot that there is something for."""
    found = {}
    for name, (title, draw) in PLOTS.items():
        svg = draw(summary)
        if svg is not None:
            found[name] = (title, svg)
    return found
