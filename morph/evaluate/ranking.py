"""The order in which static layouts give attention to blocks: recorded with the gates, given, or measured here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from morph.checkpoint import ModelSource
from morph.config import ModelConfig
from morph.errors import InvalidRequest
from morph.evaluate.forms import ASK, SUMMARISE, Draw, split
from morph.evaluate.items import Item, prompt_tokens
from morph.evaluate.sources import MissingData
from morph.gate.answers import Requests, sample_answers
from morph.gate.collect import fixed_rules, force_rules, measure
from morph.gate.labels import fit_losses
from morph.gate.layouts import random_layouts
from morph.model.model import MorphModel

PER_SET, LAYOUTS, LONGEST, ANSWER = 4, 16, 384, 24
"""Of a measurement here: prompts of each set, random layouts of each prompt, prompt and answer tokens at most."""


def given_ranking(text: str, blocks: int) -> list[int]:
    """A ranking from the command line: block numbers with commas, or a JSON file with a list under `ranking`.

    Raises:
        InvalidRequest: not a permutation of the blocks.
    """
    try:
        if Path(text).is_file():
            found = _find(json.loads(Path(text).read_text(encoding="utf-8")))
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidRequest(
            f"--ranking {text!r} is neither a file nor block numbers with commas ({error})", "ranking"
        ) from error
    return checked(found, blocks, f"--ranking {text!r}")


def _find(content: Any) -> list[int]:
    """The first list under `static_ranking` or `ranking`, at any depth; the content itself where it is a list."""
    if isinstance(content, list):
        return content
    if isinstance(content, dict):
        for key in ("static_ranking", "ranking"):
            if isinstance(content.get(key), list):
                return list(content[key])
        for value in content.values():
            if isinstance(value, dict) and (found := _find(value)):
                return found
    return []


def checked(ranking: Sequence[int], blocks: int, what: str) -> list[int]:
    """The ranking, if it names every block once."""
    if sorted(ranking) != list(range(blocks)):
        raise InvalidRequest(
            f"{what} is {list(ranking)}, want the numbers 0 to {blocks - 1}, each once, the most sensitive first",
            "ranking",
        )
    return list(ranking)


def recorded_ranking(meta: dict[str, Any], blocks: int) -> list[int] | None:
    """What fitting the gates left in config.json; None where it left nothing."""
    found = (meta.get("gate") or {}).get("static_ranking")
    return None if found is None else checked(found, blocks, "gate.static_ranking of config.json")


def calibration_items(draw: Draw, names: Sequence[str]) -> list[Item]:
    """Short prompts from the rows that the long forms keep for examples; answers are not looked at.

    Raises:
        MissingData: no set of these has any.
    """
    items = []
    for name in dict.fromkeys(name.removesuffix("_long") for name in names):
        if name not in ASK and name not in SUMMARISE and name != "squad":
            continue
        for row in split(draw.source.rows(name))[1][:PER_SET]:
            if name in ASK:
                text = ASK[name](row)
            elif name == "squad":
                text = f"{row['context']}\n\nQuestion: {row['question']}"
            else:
                text = f"{SUMMARISE[name][0]}\n\n{row['document']}"
            items.append(Item(f"{name}/{row['id']}", text, chat=name not in ASK))
    if not items:
        raise MissingData("no set here has prompts to measure a ranking on; give --ranking, or fit gates, or add sets")
    return items


def measured_ranking(
    source: ModelSource,
    tokenizer: Any,
    items: Sequence[Item],
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    seed: int,
    note: Callable[[str], None],
) -> list[int]:
    """Mean sensitivity of the blocks under random layouts: KL(base || model) on the base's answers, most sensitive
    first. The measurement of `morph gate fit`, on a few prompts."""
    note(f"measuring a static ranking on {len(items)} prompts under {LAYOUTS} random layouts each")
    model = MorphModel.from_source(source, config, dtype, device)
    prompts = [prompt_tokens(tokenizer, item)[-LONGEST:] for item in items]
    answers = sample_answers(model, prompts, ANSWER, greedy_share=1.0, seed=seed, batch_tokens=8192)
    requests = Requests(prompts, ["ranking"] * len(prompts), ["eval"] * len(prompts), answers)
    generator = torch.Generator().manual_seed(seed)
    order = list(range(config.num_blocks))
    jobs = [
        (i, force_rules(fixed_rules(random_layouts(order, LAYOUTS, generator)), config)) for i in range(len(prompts))
    ]
    found = measure(model, requests, jobs, batch_tokens=8192)
    return fit_losses(found.loss, found.layouts, found.request, len(prompts)).ranking()
