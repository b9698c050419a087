"""An evaluation: every item of every set under every layout, through the engine, kept as it goes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from morph.config import ModelConfig
from morph.engine.llm import LLM
from morph.engine.load import DTYPES
from morph.errors import InvalidRequest, MorphError, UnsupportedModel
from morph.evaluate.datasets import SUITES, Dataset, Draw, Suite, dataset
from morph.evaluate.items import Item, check_tokenizer, prompt_tokens
from morph.evaluate.layouts import (
    Requests,
    Spec,
    assign,
    expand_oracle,
    params_of,
    parse_specs,
    undecided,
    with_static_blocks,
)
from morph.evaluate.metrics import judge_choice, judge_text
from morph.evaluate.progress import Progress
from morph.evaluate.ranking import calibration_items, given_ranking, measured_ranking, recorded_ranking
from morph.evaluate.sources import FolderSource, HubSource, PackageSource, Source
from morph.evaluate.store import Record, Store, write_json
from morph.gate.calibrate import saved_matrix
from morph.gate.cost import CostTable
from morph.gate.policy import Gates

ANSWER_WEIGHT = 8
"""Work of an answer token in prompt tokens, for the time left."""

DEFAULT_LAYOUTS = {
    "quick": "attention,ssm,auto:0.25,auto:0.5,static:0.5",
    "": "attention,ssm,auto:0.25,auto:0.375,auto:0.5,static:0.25,static:0.375,static:0.5,shuffled:0.5,alternating,"
    "nemotron,random:0.5",
}


@dataclass(frozen=True)
class Options:
    """What `morph eval` was asked for.

    Attributes:
        suite: a name of `SUITES`. datasets: some sets only, or others.
        layouts: comma-separated specs; None = the suite's default.
        data: folder of local sets. hub: read sets from the hub.
        out: folder of results. limit: items at most of each set.
        lengths: range of the long forms in tokens; None = the suite's.
        ranking: blocks, most sensitive first, as text or a file; None = recorded, else measured.
        group_tokens: prompt tokens that are handed to the engine together, and kept together.
    """

    model: str
    suite: str = "quick"
    datasets: tuple[str, ...] = ()
    layouts: str | None = None
    data: Path | None = None
    hub: bool = False
    out: Path = Path("eval")
    limit: int | None = None
    lengths: tuple[int, int] | None = None
    ranking: str | None = None
    longest: int | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: str = "cpu"
    max_requests: int = 16
    memory_bytes: int | None = None
    seed: int = 0
    group_tokens: int = 24_576


@dataclass
class Part:
    """One set, ready to run.

    Attributes:
        prompts: token ids of each item's prompt. saved: c_l(n), `[items, blocks]`.
    """

    dataset: Dataset
    items: list[Item]
    prompts: list[list[int]]
    requests: Requests

    def weight(self, index: int) -> float:
        """Work of one item under one layout, in prompt tokens, about."""
        item, length = self.items[index], len(self.prompts[index])
        return float(length * max(1, len(item.choices)) + ANSWER_WEIGHT * item.max_tokens)


@dataclass
class Evaluation:
    """What was run.

    Attributes:
        records: finished items by set, layout name and item id.
        left_out: items that did not fit the context, by set.
    """

    options: Options
    config: ModelConfig
    about: dict[str, Any]
    specs: list[Spec]
    parts: list[Part]
    records: dict[str, dict[str, dict[str, Record]]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    oracle_items: int = 0
    ranking: list[int] | None = None
    seconds: float = 0.0


def source_of(options: Options, suite: Suite) -> Source:
    """Where rows come from: the hub, the folder, or the package for a suite that it has the samples of.

    Raises:
        InvalidRequest: none of the three is there.
    """
    if options.hub and options.data:
        raise InvalidRequest("--hub and --data are both given; choose one", "data")
    if options.hub:
        return HubSource()
    if options.data is not None:
        return FolderSource(options.data)
    if suite.packaged:
        return PackageSource()
    raise InvalidRequest(
        f"suite {options.suite!r} needs data: give --data FOLDER (eval/<set>/….jsonl.gz), or --hub to download it; "
        "--suite quick runs on the package's samples",
        "data",
    )


def fingerprint(llm: LLM) -> str:
    """Of what decides answers and layouts: shapes, metadata, gates, tokenizer, sizes of the weight files and, for files
    of equal size, a tensor of the base and one of the delta."""
    digest = hashlib.sha256(repr(sorted(llm.source.config.to_dict().items())).encode())
    digest.update(repr(sorted((k, str(v)) for k, v in llm.source.meta.items())).encode())
    folder = Path(llm.source.tokenizer_dir)
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.suffix == ".md":
            continue
        digest.update(f"{path.relative_to(folder)}:{path.stat().st_size}".encode())
        if path.name in ("gate.safetensors", "cost.json", "tokenizer.json"):
            digest.update(path.read_bytes())
    for name in ("model.norm.weight", "blocks.0.ssm.conv.weight"):
        if llm.source.has(name):
            digest.update(llm.source.get(name).numpy().tobytes())
    return digest.hexdigest()[:16]


def cost_table(llm: LLM) -> CostTable:
    """The model's own, or the analytic one where it has no gates."""
    if llm.source.meta.get("gate"):
        return Gates.load(llm.source).cost
    return CostTable.analytic(llm.source.config)


def prepare(llm: LLM, dataset_: Dataset, draw: Draw, cost: CostTable) -> tuple[Part, int]:
    """Items of a set as token ids, and how many were left out because they do not fit the context."""
    items, prompts = [], []
    built = dataset_.build(draw)
    for item in built:
        tokens = prompt_tokens(llm.tokenizer, item)
        longest = max((len(llm.tokenizer.encode(" " + c)) for c in item.choices), default=item.max_tokens)
        if tokens and len(tokens) + longest + 2 <= draw.longest:
            items.append(item)
            prompts.append(tokens)
    if not items:
        raise InvalidRequest(
            f"set {dataset_.name!r} has {len(built)} items and none fits {draw.longest} tokens; raise --longest, "
            "shorten with --lengths, or leave the set out"
        )
    lengths = [len(tokens) for tokens in prompts]
    requests = Requests([item.id for item in items], lengths, saved_matrix(cost, lengths))
    if len(set(requests.ids)) != len(items):
        raise InvalidRequest(f"set {dataset_.name!r} has ids that occur twice; give every row its own")
    return Part(dataset_, items, prompts, requests), len(built) - len(items)


def run_evaluation(options: Options, note: Callable[[str], None] = lambda text: None) -> Evaluation:
    """Run what is not finished yet, and return everything.

    Raises:
        MorphError: see the message; finished items stay in `options.out`, and the same call goes on with the rest.
    """
    if options.suite not in SUITES:
        raise InvalidRequest(f"suite {options.suite!r} is unknown; use one of {', '.join(SUITES)}", "suite")
    suite = SUITES[options.suite]
    specs = parse_specs(options.layouts or DEFAULT_LAYOUTS.get(options.suite, DEFAULT_LAYOUTS[""]))
    names = options.datasets or tuple(suite.counts)
    chosen = [dataset(name) for name in names]
    source = source_of(options, suite)
    began = time.monotonic()
    llm = LLM(
        options.model,
        dtype=options.dtype,
        device=options.device,
        max_requests=options.max_requests,
        memory_bytes=options.memory_bytes,
    )
    config = llm.source.config
    check_tokenizer(llm.tokenizer, config.vocab_size)
    check_specs(specs, config, bool(llm.source.meta.get("gate")))
    specs, oracle_items = expand_oracle(specs, config)
    longest = min(options.longest or llm.engine.max_context, llm.engine.max_context)
    cost = cost_table(llm)
    draw = Draw(source, llm.tokenizer, None, longest, options.seed, options.lengths or suite.lengths)
    note(f"building {len(chosen)} sets from the {source.label}")
    parts, left_out = [], {}
    for one in chosen:
        count = suite.counts.get(one.name) if options.limit is None else options.limit
        part, dropped = prepare(llm, one, replace(draw, count=count), cost)
        parts.append(part)
        if dropped:
            left_out[one.name] = dropped
    about = {
        "model": llm.model_name,
        "revision": llm.source.meta.get("revision"),
        "fingerprint": fingerprint(llm),
        "dtype": options.dtype,
        "device": options.device,
        "suite": options.suite,
        "data": source.label,
        "seed": options.seed,
        "lengths": list(draw.lengths),
        "longest": longest,
    }
    store = Store(options.out, about)
    result = Evaluation(options, config, about, specs, parts, left_out=left_out, oracle_items=oracle_items)
    if any(spec.kind in ("static", "chain") for spec in specs):
        result.ranking = find_ranking(options, llm, draw, names, store, note)
    _run_all(llm, result, store, note)
    if store.dropped:
        note(f"{store.dropped} lines that a crash had cut short were run again")
    result.seconds = time.monotonic() - began
    return result


def check_specs(specs: Sequence[Spec], config: ModelConfig, gates: bool) -> None:
    """Refuse layouts that the model cannot run, before anything runs.

    Raises:
        UnsupportedModel: the model has one mixer only, or no gates.
    """
    others = [spec.name for spec in specs if spec.kind != "attention"]
    if others and not config.is_adaptive:
        raise UnsupportedModel(
            f"model has no block with a choice, so layouts {', '.join(others)} mean nothing; use --layouts attention"
        )
    if not gates and any(spec.kind in ("auto", "shuffled") for spec in specs):
        raise UnsupportedModel("model has no gates for layout 'auto'; fit some with `morph gate fit`, or leave it out")


def find_ranking(
    options: Options, llm: LLM, draw: Draw, names: Sequence[str], store: Store, note: Callable[[str], None]
) -> list[int]:
    """The given ranking, else the recorded one, else one measured and kept in the folder."""
    blocks = llm.source.config.num_blocks
    if options.ranking:
        return given_ranking(options.ranking, blocks)
    recorded = recorded_ranking(dict(llm.source.meta), blocks)
    if recorded is not None:
        return recorded
    kept = store.folder / "ranking.json"
    if not kept.exists():
        items = calibration_items(draw, names)
        found = measured_ranking(
            llm.source,
            llm.tokenizer,
            items,
            llm.source.config,
            DTYPES[options.dtype],
            options.device,
            options.seed,
            note,
        )
        write_json(kept, {"ranking": found})
    return given_ranking(str(kept), blocks)


# ---- the loop


def _rows(part: Part, spec: Spec, oracle_items: int) -> int:
    return min(len(part.items), oracle_items) if spec.kind == "chain" and oracle_items else len(part.items)


def _run_all(llm: LLM, result: Evaluation, store: Store, note: Callable[[str], None]) -> None:
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
                done = _valid(store.read(part.dataset.name, spec.slug), part, layouts)
                known = _known(mine, part, result.config, layouts, [i for i in rows if part.items[i].id not in done])
                if known:
                    store.append(part.dataset.name, spec.slug, known)
                    done |= {record["id"]: record for record in known}
                pending = [i for i in rows if part.items[i].id not in done]
                kept = sum(part.weight(i) for i in rows) - sum(part.weight(i) for i in pending)
                progress.skip(kept)
                for group in _groups(part, pending, result.options.group_tokens):
                    records = _run_group(llm, part, spec, layouts, group)
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


def _valid(found: dict[str, Record], part: Part, layouts: torch.Tensor | None) -> dict[str, Record]:
    """Finished items whose prompt and layout are those of this run: more items or layouts may shift matched ones."""
    kept = {}
    for row, item in enumerate(part.items):
        record = found.get(item.id)
        if record is None or record["prompt_sha"] != prompt_digest(part.prompts[row]):
            continue
        if layouts is None or record["layout"] == _bits(layouts[row]):
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
        wanted = {i: _bits(whole[i]) for i in pending if not bool(choice[i])}
    else:
        wanted = {i: _bits(layouts[i]) for i in pending}
    found = []
    for i, bits in wanted.items():
        for name, records in finished.items():
            record = records.get(part.items[i].id)
            if record is not None and record["layout"] == bits:
                found.append(record | {"same_as": record.get("same_as", name)})
                break
    return found


def _bits(layout: torch.Tensor) -> str:
    return "".join("1" if bit else "0" for bit in layout.tolist())


def prompt_digest(tokens: Sequence[int]) -> str:
    """Short digest of token ids."""
    return hashlib.sha1(repr(list(tokens)).encode()).hexdigest()[:12]


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
    records: list[Record] = []
    if part.dataset.scored:
        # The border between context and choice is tokenized as lm-eval does it: the context's own tokens, then the rest
        # of the whole text's.
        texts = [item.prompt for item in items]
        scores = llm.score(texts, [[" " + choice for choice in item.choices] for item in items], params)
        for item, prompt, row in zip(items, prompts, scores, strict=True):
            logprobs = [score.logprob for score in row]
            layouts_seen = {score.layout for score in row}
            if len(layouts_seen) != 1:
                raise MorphError(f"the choices of item {item.id!r} ran under different layouts: {sorted(layouts_seen)}")
            records.append(
                {
                    "id": item.id,
                    "layout": row[0].layout,
                    "prompt_tokens": len(prompt),
                    "answer_tokens": sum(len(score.tokens) for score in row) / len(row),
                    "logprobs": [round(value, 5) for value in logprobs],
                    "greedy": [score.is_greedy for score in row],
                    "metrics": judge_choice(logprobs, item),
                    "prompt_sha": prompt_digest(prompt),
                }
            )
        return records
    asked = [replace(one, max_tokens=item.max_tokens, stop=item.stop) for one, item in zip(params, items, strict=True)]
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
                "predicted_loss": output.predicted_loss,
                "metrics": judge_text(output.text.strip(), item, part.dataset.metrics),
                "prompt_sha": prompt_digest(prompt),
            }
        )
    return records
