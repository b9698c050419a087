"""The loop of an evaluation: every item of every set under every layout, through the engine, kept as it goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from morph.config import ModelConfig
from morph.engine.llm import LLM
from morph.engine.params import SamplingParams
from morph.errors import MorphError
from morph.evaluate.items import Item
from morph.evaluate.layouts import Spec, assign, params_of, undecided, with_static_blocks
from morph.evaluate.metrics import judge_choice, judge_text
from morph.evaluate.plan import Evaluation, Part, item_digest
from morph.evaluate.progress import Progress
from morph.evaluate.store import Record, Store
from morph.layout import Layout


def _rows(part: Part, spec: Spec, oracle_items: int) -> int:
    return min(len(part.items), oracle_items) if spec.kind == "chain" and oracle_items else len(part.items)


def run_all(llm: LLM, result: Evaluation, store: Store) -> None:
    """Run what the store has not, and fill `result.records`."""
    blocks = result.config.num_blocks
    total = sum(
        part.weight(i)
        for part in result.parts
        for spec in result.specs
        for i in range(_rows(part, spec, result.oracle_items))
    )
    progress = Progress(total)
    try:
        for part in result.parts:
            gated: dict[float, torch.Tensor] = {}
            mine = result.records.setdefault(part.dataset.name, {})
            for spec in result.specs:
                layouts = assign(spec, result.config, part.requests, result.ranking, gated, result.options.seed)
                rows = range(_rows(part, spec, result.oracle_items))
                done = _valid(store.read(part.dataset.name, spec.slug), part, layouts, result.options.answer_loss)
                known = _known(mine, part, result.config, layouts, [i for i in rows if part.items[i].id not in done])
                if known:
                    store.append(part.dataset.name, spec.slug, known)
                    done |= {record["id"]: record for record in known}
                pending = [i for i in rows if part.items[i].id not in done]
                kept = sum(part.weight(i) for i in rows) - sum(part.weight(i) for i in pending)
                progress.skip(kept)
                for group in _groups(part, pending, result.options.group_size):
                    records = _run_group(llm, part, spec, layouts, group)
                    if result.options.answer_loss and not part.dataset.scored:
                        base = {r["id"]: r for r in records} if spec.kind == "attention" else mine["attention"]
                        _score_answers(llm, part, group, records, base)
                    store.append(part.dataset.name, spec.slug, records)
                    done |= {record["id"]: record for record in records}
                    progress.advance(
                        sum(part.weight(i) for i in group), f"{part.dataset.name} {spec.name} {len(done)}/{len(rows)}"
                    )
                mine[spec.name] = {part.items[i].id: done[part.items[i].id] for i in rows}
                if spec.kind == "auto":
                    assert spec.value is not None
                    bits = [[c == "1" for c in done[item.id]["layout"]] for item in part.items]
                    gated[spec.value] = torch.tensor(bits).view(-1, blocks)
    finally:
        progress.close()


def _valid(found: dict[str, Record], part: Part, layouts: torch.Tensor | None, answer_loss: bool) -> dict[str, Record]:
    """Finished items whose question and layout are those of this run: more items or layouts may shift matched ones."""
    kept = {}
    for row, item in enumerate(part.items):
        record = found.get(item.id)
        if record is None or record["item_sha"] != item_digest(item, part.prompts[row]):
            continue
        if answer_loss and not part.dataset.scored and "answer_logprob" not in record:
            continue
        if layouts is None or record["layout"] == str(Layout.from_bits(layouts[row].tolist())):
            kept[item.id] = record
    return kept


def _known(
    finished: dict[str, dict[str, Record]],
    part: Part,
    config: ModelConfig,
    layouts: torch.Tensor | None,
    pending: Sequence[int],
) -> list[Record]:
    """Records of items that ran under the very same layout before, under another name: greedy answers of one layout are
    equal. Of the gates' layouts, those of prompts that leave them no choice are known beforehand."""
    if layouts is None:
        saved = part.requests.saved
        whole = with_static_blocks(config, torch.ones(len(part.items), config.num_blocks, dtype=torch.bool))
        choice = undecided(config, saved)
        wanted = {i: str(Layout.from_bits(whole[i].tolist())) for i in pending if not bool(choice[i])}
    else:
        wanted = {i: str(Layout.from_bits(layouts[i].tolist())) for i in pending}
    found = []
    for i, bits in wanted.items():
        for name, records in finished.items():
            record = records.get(part.items[i].id)
            if record is not None and record["layout"] == bits:
                found.append(record | {"same_as": record.get("same_as", name)})
                break
    return found


def _groups(part: Part, pending: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Items in order, in groups of about `tokens` tokens of work."""
    group: list[int] = []
    size = 0.0
    for index in pending:
        group.append(index)
        size += part.weight(index)
        if size >= tokens:
            yield group
            group, size = [], 0.0
    if group:
        yield group


def _run_group(llm: LLM, part: Part, spec: Spec, layouts: torch.Tensor | None, group: Sequence[int]) -> list[Record]:
    params = [params_of(spec, None if layouts is None else layouts[i]) for i in group]
    items, prompts = [part.items[i] for i in group], [part.prompts[i] for i in group]
    run = _score_choices if part.dataset.scored else _write_answers
    return run(llm, part, items, prompts, params)


def _score_choices(
    llm: LLM, part: Part, items: list[Item], prompts: list[list[int]], params: list[SamplingParams]
) -> list[Record]:
    # The border between context and choice is tokenized as lm-eval does it: the context's own tokens, then the rest
    # of the whole text's.
    choices = [[" " + choice for choice in item.choices] for item in items]
    records: list[Record] = []
    for item, prompt, row in zip(items, prompts, llm.score([i.prompt for i in items], choices, params), strict=True):
        layouts = {score.layout for score in row}
        if len(layouts) != 1:
            raise MorphError(f"the choices of item {item.id!r} ran under different layouts: {sorted(layouts)}")
        logprobs = [score.logprob for score in row]
        records.append(
            {
                "id": item.id,
                "layout": row[0].layout,
                "prompt_tokens": len(prompt),
                "answer_tokens": sum(len(score.tokens) for score in row) / len(row),
                "logprobs": [round(value, 5) for value in logprobs],
                "greedy": [score.is_greedy for score in row],
                "metrics": judge_choice(logprobs, item),
                "item_sha": item_digest(item, prompt),
            }
        )
    return records


def _write_answers(
    llm: LLM, part: Part, items: list[Item], prompts: list[list[int]], params: list[SamplingParams]
) -> list[Record]:
    asked = [replace(one, max_tokens=item.max_tokens, stop=item.stop) for one, item in zip(params, items, strict=True)]
    records: list[Record] = []
    for item, prompt, output in zip(items, prompts, llm.generate(prompts, asked), strict=True):
        if output.error or output.layout is None:
            raise MorphError(f"item {item.id!r} of {part.dataset.name} failed: {output.error}")
        records.append(
            {
                "id": item.id,
                "layout": output.layout,
                "prompt_tokens": len(prompt),
                "answer_tokens": len(output.token_ids),
                "answer": output.text,
                "tokens": output.token_ids,
                "predicted_loss": output.predicted_loss,
                "metrics": judge_text(output.text.strip(), item, part.dataset.metrics),
                "item_sha": item_digest(item, prompt),
            }
        )
    return records


def _score_answers(llm: LLM, part: Part, group: Sequence[int], records: list[Record], base: dict[str, Record]) -> None:
    """Add to each record the mean log probability per token of the base's answer under the record's layout."""
    params = [SamplingParams(layout=record["layout"]) for record in records]
    answers: list[Any] = [[base[record["id"]]["tokens"]] for record in records]
    for record, (score,) in zip(records, llm.score([part.prompts[i] for i in group], answers, params), strict=True):
        record["answer_logprob"] = score.logprob / len(score.tokens)
