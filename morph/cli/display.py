"""How layouts and figures look in a terminal, with plain ASCII where there is none."""

from __future__ import annotations

import codecs

from rich.console import Console
from rich.text import Text

from morph.engine.params import RequestOutput

ATTENTION_STYLE, SSM_STYLE, OPEN_STYLE = "dark_orange", "deep_sky_blue1", "grey50"


def is_plain(console: Console) -> bool:
    """True where colours and block characters would not show."""
    if not console.is_terminal or console.is_dumb_terminal:
        return True
    try:
        "█░·".encode(codecs.lookup(console.encoding).name)
    except (LookupError, UnicodeEncodeError):
        return True
    return False


def layout_strip(layout: str | None, blocks: int, plain: bool) -> Text:
    """One cell per block, block 0 first; `layout` None = not decided yet.

    Args:
        plain: `#` attention, `.` ssm, `?` undecided, instead of coloured cells.
    """
    if layout is None:
        return Text("?" * blocks) if plain else Text("·" * blocks, style=OPEN_STYLE)
    if plain:
        return Text(layout.replace("1", "#").replace("0", "."))
    strip = Text()
    for bit in layout:
        strip.append("█" if bit == "1" else "░", style=ATTENTION_STYLE if bit == "1" else SSM_STYLE)
    return strip


def legend(plain: bool) -> Text:
    """What the cells mean."""
    text = Text("layout: block 0 first, ")
    text += layout_strip("1", 1, plain) + Text(" attention ") + layout_strip("0", 1, plain) + Text(" ssm")
    return text


def printable(text: str) -> str:
    """Model text without control characters, which could move the cursor or change the terminal's state."""
    return "".join(char for char in text if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f"))


def attention_share(output: RequestOutput) -> float | None:
    """Attention blocks over blocks, None while the layout is undecided."""
    return output.layout.count("1") / len(output.layout) if output.layout else None


def tokens_per_second(output: RequestOutput, elapsed: float | None = None) -> float | None:
    """Decoding speed after the first token.

    Args:
        elapsed: seconds since submission, for a request that still runs.
    """
    total = output.e2e if output.e2e is not None else elapsed
    tokens = len(output.token_ids) - 1
    if total is None or output.ttft is None or tokens < 1 or total <= output.ttft:
        return None
    return tokens / (total - output.ttft)


def figures(output: RequestOutput, plain: bool) -> Text:
    """One line about a finished request: layout, attention share, latency, speed."""
    dot = " | " if plain else " · "
    layout = output.layout or ""
    line = layout_strip(output.layout, len(layout), plain)
    share = attention_share(output)
    parts = []
    if share is not None:
        origin: str = output.layout_source or ""
        if output.attention_budget is not None:
            origin += f", budget {output.attention_budget:g}"
        parts.append(f"attention {output.attention_blocks}/{len(layout)} = {share:.0%} ({origin})")
    if output.predicted_loss is not None:
        parts.append(f"predicted loss {output.predicted_loss:.3f}")
    if output.ttft is not None:
        parts.append(f"ttft {output.ttft:.2f} s")
    speed = tokens_per_second(output)
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    parts.append(f"{len(output.prompt_token_ids)} + {len(output.token_ids)} tokens")
    if output.cached_tokens:
        parts.append(f"{output.cached_tokens} cached")
    line.append(dot.join(["", *parts]) if layout else dot.join(parts), style="" if plain else "dim")
    return line
