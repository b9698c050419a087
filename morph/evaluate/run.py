"""An evaluation from its options: the model, the sets, the layouts, and what was finished before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from morph.config import ModelConfig
from morph.engine.llm import LLM
from morph.engine.load import DTYPES
from morph.errors import InvalidRequest, UnsupportedModel
from morph.evaluate.datasets import SUITES, Dataset, Suite, dataset
from morph.evaluate.forms import Draw
from morph.evaluate.items import check_tokenizer, prompt_tokens
from morph.evaluate.layouts import Requests, Spec, expand_oracle, parse_specs
from morph.evaluate.loop import run_all
from morph.evaluate.plan import Evaluation, Options, Part
from morph.evaluate.ranking import calibration_items, given_ranking, measured_ranking, recorded_ranking
from morph.evaluate.sources import FolderSource, HubSource, PackageSource, Source
from morph.evaluate.store import Store, write_json
from morph.gate.calibrate import saved_matrix
from morph.gate.cost import CostTable
from morph.gate.policy import Gates

DEFAULT_LAYOUTS = {
    "quick": "attention,ssm,auto:0.25,auto:0.5,static:0.5",
    "": "attention,ssm,auto:0.25,auto:0.375,auto:0.5,static:0.25,static:0.375,static:0.5,shuffled:0.5,alternating,"
    "nemotron,random:0.5",
}


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
    built = dataset_.build(replace(draw, count=None) if dataset_.uneven else draw)
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
    left_out = len(built) - len(items)
    items, prompts = items[: draw.count], prompts[: draw.count]
    lengths = [len(tokens) for tokens in prompts]
    requests = Requests([item.id for item in items], lengths, saved_matrix(cost, lengths))
    if len(set(requests.ids)) != len(items):
        raise InvalidRequest(f"set {dataset_.name!r} has ids that occur twice; give every row its own")
    return Part(dataset_, items, prompts, requests), left_out


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
    run_all(llm, result, store)
    if store.dropped:
        note(f"{store.dropped} lines that a crash had cut short were run again")
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
