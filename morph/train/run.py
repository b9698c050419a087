"""`morph distill` without its command line: both stages, resumed where they were left, and the export."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from morph.checkpoint import ModelSource
from morph.durations import clock
from morph.errors import InvalidRequest
from morph.train.config import StageConfig, TrainConfig
from morph.train.export import DeltaType, export_model
from morph.train.gradcheck import require_right_gradients
from morph.train.model import fingerprint, load_mixers, mixer_parameters, open_converted, training_model
from morph.train.parallel import Group, join, leave
from morph.train.progress import Progress
from morph.train.snapshot import STAGES, Position, load_snapshot, save_snapshot, snapshots
from morph.train.sources import Tokenising, read_sources
from morph.train.stage import StageRunner
from morph.train.stream import Mixture
from morph.train.tokens import TokenSet
from morph.train.trunk import Trunk

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FREE_KEYS = ("compile", "graphs", "log_every", "checkpoint_seconds", "keep")
"""Keys of [run] that may change when a run goes on."""


@dataclass(frozen=True)
class Options:
    """What `morph distill` is asked for.

    Attributes:
        model: converted model. data: sources, see `morph.train.sources`. out: folder of the run.
        stages: of `align` and `distill`, those to run.
        max_seconds: stop cleanly before this many seconds are over.
        init: mixers to begin with instead of the model's own. teacher: base to learn from, default the model's own.
        export, revision: type of the exported mixers and name of the exported model's revision.
    """

    model: Path
    data: tuple[str, ...]
    out: Path
    config: TrainConfig
    stages: tuple[str, ...] = STAGES
    max_seconds: float | None = None
    init: Path | None = None
    teacher: Path | None = None
    device: str = "auto"
    export: DeltaType = "int8"
    revision: str = "trained"


@dataclass
class Outcome:
    """How a run ended: whether all stages are done, and where the exported model lies."""

    finished: bool
    model: Path
    facts: dict[str, Any] = field(default_factory=dict)


def run_distill(options: Options, say: Callable[[str], None] = print) -> Outcome:
    """Train, from the start or from the run's last checkpoint, and export the model to `out/model`.

    Raises:
        MorphError: see the messages; checkpoints written before are kept.
    """
    started = time.monotonic()
    group = join(options.device)
    try:
        return _run(options, group, started, say if group.is_first else lambda line: None)
    finally:
        leave()


def _run(options: Options, group: Group, started: float, say: Callable[[str], None]) -> Outcome:
    source, base = open_converted(options.model, options.teacher)
    sets = _data(options, source)
    config = options.config
    folder = options.out / "checkpoints"
    position, tensors = _position(options, source, folder)
    dtype_name = config.run.dtype
    if dtype_name == "auto":
        dtype_name = "bfloat16" if group.device.type == "cuda" else "float32"
    if dtype_name not in DTYPES:
        raise InvalidRequest(f"run.dtype is {dtype_name!r}; use auto, float32 or bfloat16")
    model = training_model(source, base, DTYPES[dtype_name], group.device)
    parameters = mixer_parameters(model)
    if tensors is None and options.init is not None:
        load_mixers(parameters, options.init, source.config)
    if tensors is not None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[f"parameter.{name}"])
    shape = source.config
    window = shape.ssm.window if shape.ssm else 0
    check = require_right_gradients(
        group.device, shape.num_heads, shape.head_dim, shape.num_kv_heads, DTYPES[dtype_name], window
    )
    if check is not None:
        say(f"gradients of the fast kernels agree with float32 torch: {check}")
    compiled = group.device.type == "cuda" if config.run.compile == "auto" else bool(config.run.compile)
    trunk = Trunk(model, compiled, shape)
    options.out.mkdir(parents=True, exist_ok=True)
    progress = Progress(say, options.out / "log.jsonl" if group.is_first else None)
    say(_opening(sets, options, group, dtype_name, compiled, position, resumed=tensors is not None))
    # Time to write a checkpoint and the model comes off the end.
    spare = None if options.max_seconds is None else min(30.0, 0.1 * options.max_seconds)
    deadline = None if options.max_seconds is None or spare is None else started + options.max_seconds - spare
    facts: dict[str, Any] = {}
    finished = True
    for stage in STAGES[STAGES.index(position.stage) :]:
        if stage not in options.stages:
            if stage == position.stage and stage != STAGES[-1]:
                position = _next(position, config, stage)
            continue
        section = _section(config, stage)
        mixture = Mixture(sets, config.run.seed + STAGES.index(stage), max(length for _, length in section.lengths))
        runner = StageRunner(
            trunk, parameters, mixture, config.run, section, position, group, folder, progress, deadline
        )
        if tensors is not None and position.drawn:
            runner.restore(tensors)
        finished = runner.train()
        result = runner.optimizer.result()
        facts |= {f"{stage}_tokens": position.updates * section.tokens_per_step}
        if runner.evaluations:
            facts["held_out_kl_by_attention_blocks"] = runner.evaluations
        if not finished:
            say(f"stopped at {stage} step {position.step} of {section.steps} as asked; the same command goes on")
            break
        if stage == STAGES[-1]:
            runner.save()
            break
        # The next stage begins with the average, where there is one.
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(result[name])
        position, tensors = _next(position, config, stage), None
        if group.is_first:
            state = {f"parameter.{name}": parameter.detach() for name, parameter in parameters.items()}
            save_snapshot(folder, position, state, config.run.keep)
        group.wait()
    else:
        result = {name: parameter.detach() for name, parameter in parameters.items()}
    outcome = Outcome(finished, options.out / "model", facts)
    if group.is_first:
        described = facts | {"tokens": position.tokens, "data": ", ".join(one.name for one, _ in sets)}
        written = export_model(
            source, options.model, result, outcome.model, described, options.export, options.revision
        )
        say(
            f"model in {outcome.model}: mixers {written['bytes'] / 1e6:.1f} MB, largest rounding error "
            f"{written['error']:.2%}; {clock(time.monotonic() - started)} in all"
        )
    group.wait()
    return outcome


def _section(config: TrainConfig, stage: str) -> StageConfig:
    return config.align if stage == "align" else config.distill


def _next(position: Position, config: TrainConfig, stage: str) -> Position:
    """The beginning of the stage after `stage`."""
    following = STAGES[STAGES.index(stage) + 1]
    first = _section(config, following).first_step
    return Position(following, first, first, 0, {}, [], position.tokens, position.model, position.config)


def _data(options: Options, source: ModelSource) -> list[tuple[TokenSet, float]]:
    if not options.data:
        raise InvalidRequest("there is no data to train on; name some with --data", "data")
    sets = read_sources(options.data, source.tokenizer_dir, options.config.run.seed)
    folder = source.tokenizer_dir
    tokenizer = Tokenising(folder).fingerprint if (folder / "tokenizer.json").is_file() else None
    for tokens, _ in sets:
        tokens.check(source.config.vocab_size, tokenizer)
    longest = max(length for stage in options.stages for _, length in _section(options.config, stage).lengths)
    if longest > source.config.max_context:
        raise InvalidRequest(
            f"sequences of {longest} tokens exceed the model's context of {source.config.max_context}; "
            "set shorter lengths"
        )
    return sets


def _position(options: Options, source: ModelSource, folder: Path) -> tuple[Position, dict[str, torch.Tensor] | None]:
    """Where to begin: the run's last checkpoint, or the start of the first wanted stage."""
    settings = options.config.to_dict()
    mark = fingerprint(source)
    found = snapshots(folder)
    if not found:
        stage = options.stages[0]
        first = _section(options.config, stage).first_step
        return Position(stage, first, first, 0, {}, [], 0, mark, settings), None
    position, tensors = load_snapshot(found[-1])
    if position.model != mark:
        raise InvalidRequest(f"{found[-1]} is of another model than {options.model}; choose another --out", "out")
    changed = _changes(position.config, settings)
    if changed:
        raise InvalidRequest(
            f"the run in {options.out} was made with other settings ({changed}); use the same, or another --out with "
            f"--init {options.out / 'model'}"
        )
    return position, tensors


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Keys that differ and may not."""
    out = []
    for section, values in new.items():
        for key, value in values.items():
            before = old.get(section, {}).get(key)
            # JSON has no tuples.
            before = tuple(map(tuple, before)) if key == "lengths" and before else before
            if before != value and not (section == "run" and key in FREE_KEYS):
                out.append(f"{section}.{key} was {before!r}, now {value!r}")
    return "; ".join(out)


def _opening(
    sets: Sequence[tuple[TokenSet, float]],
    options: Options,
    group: Group,
    dtype: str,
    compiled: bool,
    position: Position,
    resumed: bool,
) -> str:
    total = sum(weight for _, weight in sets)
    mix = ", ".join(f"{one.name} {len(one) / 1e6:.2f}M tokens ({weight / total:.0%})" for one, weight in sets)
    where = f"{group.size} × {group.device.type}, {dtype}{', compiled' if compiled else ''}"
    begin = f"goes on at {position.stage} step {position.step}" if resumed else f"begins with {position.stage}"
    return f"{options.model} on {where}; data: {mix}; {begin}"
