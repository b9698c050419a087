"""Model cards of converted and of trained models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REQUIRED = ("base", "licence", "mixers", "state")
"""Rows that every card has."""


def card_fields(meta: Mapping[str, Any], base_name: str, facts: Mapping[str, Any]) -> dict[str, str]:
    """Rows of the card's table, in order.

    Args:
        meta: `config.json` of the folder. facts: what is known of the training.
    """
    model = meta["model"]
    ssm = model["ssm"]
    kinds = list(model["block_kinds"])
    window = f"window {ssm['window']}" if ssm["window"] else "no window"
    base = meta.get("base") or {}
    fields = {
        "base": f"{base.get('source') or base_name}" + (f", sha256 {base['sha256']}" if base.get("sha256") else ""),
        "licence": f"{meta.get('licence') or 'unknown'} (the base's; see its own card)",
        "mixers": f"{ssm['kind']}, {window}, one state per {ssm['state_heads']} head, gate rank {ssm['gate_rank']}",
        "blocks": ", ".join(
            f"{kinds.count(kind)} {kind}" for kind in ("adaptive", "attention", "ssm") if kind in kinds
        ),
    }
    return fields | {name: str(value) for name, value in facts.items()}


def model_card(meta: Mapping[str, Any], base_name: str, facts: Mapping[str, Any]) -> str:
    """Markdown text of the card."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in card_fields(meta, base_name, facts).items())
    return f"""# {meta["name"]}, revision {meta["revision"]}

A hybrid model for Morph: each adaptive block runs attention or an SSM mixer, chosen per request. The base is frozen, so
the all-attention layout is the base model.

| | |
|---|---|
{rows}

Serve it under a layout of your choice (`attention`, `ssm`, or one 0/1 per block). It has no gates yet, so `auto` is
refused.
"""
