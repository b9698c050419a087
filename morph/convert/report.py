"""The figures of a conversion as tables in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from morph.config import ModelConfig
from morph.convert.figures import figures


def amount(value: float, unit: str = "") -> str:
    """A number with three digits and a decimal prefix: `29.3M`."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{prefix}{unit}"
    return f"{value:.3g}{unit}"


def print_figures(config: ModelConfig, console: Console) -> None:
    """Parameters, memory, break-even lengths, and FLOPs per token by context."""
    facts = figures(config)
    table = Table(box=None, show_header=False)
    kinds = config.block_kinds
    for name, value in (
        ("base parameters", amount(facts.base_parameters)),
        ("mixer parameters", amount(facts.delta_parameters)),
        ("blocks", ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))),
        ("state per ssm block", amount(facts.state_bytes_per_block, "B")),
        ("KV per token and attention block", amount(facts.kv_bytes_per_token_per_block, "B")),
        ("the ssm of a block needs less memory from", f"{facts.break_even_memory} tokens"),
        ("fewer FLOPs in decode from", f"{facts.break_even_decode} tokens"),
        ("fewer FLOPs in prefill from", f"{facts.break_even_prefill} tokens"),
    ):
        table.add_row(name, value)
    console.print(table)
    costs = Table(title="FLOPs per decoded token and memory per request, from the shapes")
    for column in ("context", "attn", "half", "ssm", "decode saves", "prefill saves", "KV", "states"):
        costs.add_column(column, justify="right")
    for row in facts.rows:
        costs.add_row(
            str(row.context),
            amount(row.attention),
            amount(row.half),
            amount(row.ssm),
            f"{row.decode_saved:.0%}",
            f"{row.prefill_saved:.0%}",
            amount(row.attention_bytes, "B"),
            amount(row.ssm_bytes, "B"),
        )
    console.print(costs)
