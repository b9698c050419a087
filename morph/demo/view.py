"""Panels, progress lines and the final table of the demo."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from morph.cli.display import attention_share, layout_strip, legend, printable, tokens_per_second

if TYPE_CHECKING:
    from morph.demo.run import Track

PANEL_WIDTH = 40
"""Least columns of a panel."""

LEAST_HEIGHT = 4
"""Border, layout strip, one line of text."""


def live_view(console: Console, tracks: Sequence[Track], blocks: int) -> Live:
    """A display that redraws itself from the tracks' state."""
    return Live(
        get_renderable=lambda: _panels(console, tracks, blocks),
        console=console,
        refresh_per_second=8,
        transient=False,
    )


def _panels(console: Console, tracks: Sequence[Track], blocks: int) -> RenderableType:
    columns = next((count for count in (4, 2) if console.width >= count * PANEL_WIDTH), 1)
    rows = -(-len(tracks) // columns)
    # Two lines are the legend and the cursor's; a taller picture than the screen could not be redrawn.
    height = max(LEAST_HEIGHT, (console.height - 2) // rows)
    width = console.width // columns - 4
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    cells = [_panel(console, track, blocks, width, height) for track in tracks]
    for row in range(rows):
        grid.add_row(*cells[row * columns : (row + 1) * columns])
    return Group(legend(plain=False), grid)


def _panel(console: Console, track: Track, blocks: int, width: int, height: int) -> Panel:
    output = track.output
    strip = layout_strip(output.layout if output else None, blocks, plain=False)
    strip.truncate(width)
    text = Text(printable(output.text) if output else "")
    lines = text.wrap(console, width)[-(height - 3) :]
    done = " [green]done[/green]" if track.finished else ""
    return Panel(
        Group(strip, *lines),
        title=f"[bold]{track.prompt.kind}[/bold] {track.prompt_tokens} tokens{done}",
        subtitle=_figures(track),
        title_align="left",
        subtitle_align="left",
        height=height,
        border_style="green" if track.finished else "grey50",
    )


def _figures(track: Track) -> str:
    output = track.output
    elapsed = time.perf_counter() - track.begin
    if output is None or output.ttft is None:
        return f"prefill {elapsed:.1f} s" if track.begin else "waiting"
    share, speed = attention_share(output), tokens_per_second(output, elapsed)
    parts = [f"attention {share:.0%}"] if share is not None else []
    parts.append(f"ttft {output.ttft:.2f} s")
    if speed is not None:
        parts.append(f"{speed:.1f} tok/s")
    return " · ".join(parts)


def plain_progress(console: Console, tracks: Sequence[Track], blocks: int) -> Callable[[Track], None]:
    """For logs: a line when a layout is decided and one when an answer is complete."""
    decided: set[str] = set()
    console.print(legend(plain=True))

    def changed(track: Track) -> None:
        output = track.output
        assert output is not None
        kind = f"{track.prompt.kind:<11}"
        if output.layout is not None and track.prompt.kind not in decided:
            decided.add(track.prompt.kind)
            strip = layout_strip(output.layout, blocks, plain=True).plain
            _line(
                console,
                f"{kind} {track.prompt_tokens:>5} tokens  {strip}  attention {attention_share(output):.0%}",
            )
        if output.finished:
            answer = " ".join(printable(output.text).split())
            shown = answer if len(answer) <= 80 else f"{answer[:77]}..."
            _line(console, f"{kind} done in {output.e2e or 0.0:.1f} s: {shown}")

    return changed


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def summary(tracks: Sequence[Track], blocks: int, seconds: float, plain: bool) -> RenderableType:
    """One row per prompt, and the totals."""
    table = Table(box=box.ASCII if plain else box.SIMPLE_HEAD, title="morph demo", title_justify="left")
    table.add_column("prompt", no_wrap=True)
    for name in ("tokens", "answer"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout", no_wrap=True, min_width=blocks)
    for name in ("attention", "ttft s", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    made = 0
    for track in tracks:
        output = track.output
        assert output is not None
        made += len(output.token_ids)
        share, speed = attention_share(output), tokens_per_second(output)
        table.add_row(
            track.prompt.kind,
            str(track.prompt_tokens),
            str(len(output.token_ids)),
            layout_strip(output.layout, blocks, plain),
            "" if share is None else f"{share:.0%}",
            "" if output.ttft is None else f"{output.ttft:.2f}",
            "" if speed is None else f"{speed:.1f}",
        )
    prompt = sum(track.prompt_tokens for track in tracks)
    total = f"{len(tracks)} requests at the same time: {prompt} prompt and {made} answer tokens in {seconds:.1f} s"
    return Group(table, Text(total))
