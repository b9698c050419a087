"""`morph gate inspect`: what the gates of a model say."""

from __future__ import annotations

from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from morph.checkpoint import open_model
from morph.cli.display import is_plain, layout_strip, legend
from morph.errors import InvalidRequest
from morph.gate.policy import Gates
from morph.hub import resolve_model

SHOWN = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
LEVELS = " .:-=+*#%@"


def inspect_command(
    model: str, prompts: list[str], raw: bool, budget: float, dtype: Literal["float32", "bfloat16"]
) -> None:
    """Print tables.

    Raises:
        UnsupportedModel: the model has no gates.
    """
    folder = resolve_model(model)
    source = open_model(folder)
    gates = Gates.load(source)
    console = Console(highlight=False)
    if not console.is_terminal:
        # A log has no width of its own; rows should not be broken.
        console = Console(highlight=False, width=max(140, 60 + source.config.num_blocks))
    meta = source.meta["gate"]
    if prompts:
        for text in prompts:
            console.print(
                _prompt_table(_decide(model, text, raw, budget, dtype), gates, text, budget, is_plain(console))
            )
        console.print(legend(is_plain(console)))
        return
    fitted = meta.get("fit")
    if fitted:
        facts = ", ".join(f"{name} {value}" for name, value in fitted.items())
        console.print(f"fitted on: {facts}")
    console.print(_tau_table(gates))
    if "kinds" in meta:
        console.print(_kinds_table(meta["kinds"], source.config.num_blocks))
        console.print(f"û per block, block 0 first, in steps of a tenth of the largest: '{LEVELS}'", style="dim")
    else:
        console.print("config.json records no û by kind of prompt; gates fitted by `morph gate fit` do", style="dim")


def _tau_table(gates: Gates) -> Table:
    cost = gates.cost
    table = Table("budget", "τ (nats per second)", title="Threshold by budget", box=None)
    for budget in SHOWN:
        table.add_row(f"{budget:g}", f"{gates.tau_of(budget):.4g}")
    table.caption = f"cost table: {cost.source}, {cost.device}, answers of {cost.mean_answer_tokens:.0f} tokens"
    return table


def _kinds_table(kinds: dict[str, Any], blocks: int) -> Table:
    largest = max((max(entry["utility"]) for entry in kinds.values()), default=0.0) or 1.0
    budgets = sorted({budget for entry in kinds.values() for budget in entry.get("attention_blocks", {})})
    columns = ["kind", "requests", "tokens", "sum of û", *(f"attention at {b}" for b in budgets), "û per block"]
    table = Table(*columns, title="By kind of prompt, as fitted", box=None)
    for kind, entry in sorted(kinds.items(), key=lambda item: -sum(item[1]["utility"])):
        marks = "".join(LEVELS[_level(u / largest)] for u in entry["utility"])
        counts = [f"{entry.get('attention_blocks', {}).get(b, float('nan')):.1f} of {blocks}" for b in budgets]
        table.add_row(
            kind, str(entry["requests"]), f"{entry['mean_tokens']:.0f}", f"{sum(entry['utility']):.3f}", *counts,
            Text(marks),
        )  # fmt: skip
    return table


def _level(share: float) -> int:
    return min(len(LEVELS) - 1, max(0, round(share * (len(LEVELS) - 1))))


def _decide(model: str, text: str, raw: bool, budget: float, dtype: Literal["float32", "bfloat16"]) -> Any:
    """The request after its prefill in the engine: its bits and û are those that serving would take."""
    from morph.engine.llm import LLM
    from morph.engine.params import SamplingParams
    from morph.server.prompts import chat_prompt

    llm = LLM(model, dtype=dtype, max_requests=1)
    tokenizer = llm.tokenizer
    tokens = tokenizer.encode(text) if raw else chat_prompt(tokenizer, [{"role": "user", "content": text}])
    if not tokens:
        raise InvalidRequest("--prompt is empty; give some text")
    params = SamplingParams(max_tokens=1, layout="auto", attention_budget=budget)
    request = llm.engine.make_request("inspect", list(tokens), params)
    llm.engine.add(request)
    while not llm.engine.idle:
        llm.engine.step()
    return request


def _prompt_table(request: Any, gates: Gates, text: str, budget: float, plain: bool) -> Table:
    n, tau = request.prompt_len, gates.tau_of(budget)
    bits = "".join("1" if bit else "0" for bit in request.bits)
    shown = text if len(text) <= 60 else text[:57] + "..."
    table = Table(
        "block", "û", "c (µs)", "τ·c", "mixer", title=Text(f"{shown!r}: {n} tokens, budget {budget:g}"), box=None
    )
    for block, (bit, utility) in enumerate(zip(request.bits, request.utilities, strict=True)):
        saved = gates.cost.saved_seconds(block, n)
        static = gates.weights[block] is None
        threshold = "static" if static else "cheaper" if saved <= 0 else f"{tau * saved:.5f}"
        table.add_row(
            str(block),
            "" if static else f"{utility:.5f}",
            f"{saved * 1e6:.1f}",
            threshold,
            "attention" if bit else "ssm",
        )
    table.caption = Text("layout ") + layout_strip(bits, len(bits), plain)
    return table
