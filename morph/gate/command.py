"""What `morph gate fit` does around the stages: opening, checking, fingerprints, writing."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from morph.checkpoint import ModelSource, open_model
from morph.checkpoint.digest import sha256_of
from morph.checkpoint.tokenizer import load_tokenizer
from morph.errors import InvalidRequest
from morph.gate.answers import Requests
from morph.gate.cost import CostTable
from morph.gate.folder import check_model, check_target, write_model
from morph.gate.pipeline import fit_model
from morph.gate.prompts import drawn_requests, given_requests
from morph.gate.stages import PipelineConfig, Run
from morph.gate.work import LIGHT, Deadline, WorkFolder
from morph.hub import resolve_model
from morph.model.model import MorphModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_PROMPTS = 3000
LONGEST = 4000
"""Longest drawn prompt in tokens, where the context allows."""

BATCH_TOKENS = {"cpu": 16_384, "cuda": 655_360}
STAGES_VERSION = 1
"""Raised when a stage changes what it makes, so that no run goes on from another version's results."""


@dataclass(frozen=True)
class FitOptions:
    """Options of `morph gate fit`."""

    model: str
    data: Path | None
    requests: Path | None
    prompts: int | None
    work: Path | None
    out: Path | None
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    limit_seconds: float | None
    batch_tokens: int | None
    seed: int


def one_source(data: Path | None, requests: Path | None) -> None:
    """Refuse none or both of --data and --requests."""
    if (data is None) == (requests is None):
        raise InvalidRequest("give either --data (prompts) or --requests (prompts with answers), one of the two")


def check_device(device: str) -> None:
    """Refuse a GPU that is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("--device cuda, but torch finds no GPU; use --device cpu")


def model_fingerprint(folder: Path, source: ModelSource) -> str:
    """sha256 over what decides a model's losses: shape, base, weights and delta, not the gates."""
    meta = {k: v for k, v in source.meta.items() if k != "gate"}
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in [*source.meta.get("weights", []), *source.meta.get("delta", [])]:
        digest.update(sha256_of(folder / str(name)).encode())
    return digest.hexdigest()


def own_cost(folder: Path, meta: dict[str, Any]) -> CostTable | None:
    """The model's cost table where it was measured: a new fit goes on with it."""
    name = (meta.get("gate") or {}).get("cost_table")
    if name is None or not (folder / str(name)).exists():
        return None
    table = CostTable.load(folder / str(name))
    return table if table.source == "measured" else None


def fit_command(options: FitOptions, log: Callable[[str], None], config: PipelineConfig | None = None) -> Path:
    """Fit gates and write them; returns the folder.

    Raises:
        InvalidRequest, UnsupportedModel, ModelNotFound: before anything long begins.
        OutOfTime: the limit came first; the work folder keeps what there is.
    """
    deadline = Deadline(options.limit_seconds)
    one_source(options.data, options.requests)
    check_device(options.device)
    folder = resolve_model(options.model)
    source = open_model(folder)
    check_model(folder, source.meta, source.config.is_adaptive)
    target = check_target(folder, options.out)
    if options.work is None:
        if options.limit_seconds is not None:
            raise InvalidRequest("--limit-seconds without --work would lose what was measured; give --work DIR")
        with tempfile.TemporaryDirectory(prefix="morph-gate-") as temporary:
            return _fit(options, log, config, deadline, source, folder, target, Path(temporary) / "work")
    return _fit(options, log, config, deadline, source, folder, target, options.work)


def _fit(
    options: FitOptions,
    log: Callable[[str], None],
    config: PipelineConfig | None,
    deadline: Deadline,
    source: ModelSource,
    folder: Path,
    target: Path,
    work_path: Path,
) -> Path:
    batch_tokens = options.batch_tokens or BATCH_TOKENS[options.device]
    config = config or PipelineConfig(batch_tokens=batch_tokens, seed=options.seed)
    given = None if options.requests is None else given_requests(options.requests, source.config)
    if options.data is not None and not options.data.exists():
        drawn_requests(options.data, None, 0, 0)  # says what is missing, before a work folder is made
    settings = asdict(config) | {
        "stages": STAGES_VERSION,
        "model": model_fingerprint(folder, source),
        "requests": None if options.requests is None else sha256_of(options.requests),
        "data": None if options.data is None else str(options.data),
        "prompts": options.prompts,
        "dtype": options.dtype,
    }
    # How much runs at once changes the time, not the results.
    del settings["batch_tokens"]
    work = WorkFolder(work_path, settings)
    requests = given or _drawn(options, source, config, work)
    if options.device == "cuda":
        torch.set_float32_matmul_precision("high")
    model = MorphModel.from_source(source, source.config, DTYPES[options.dtype], options.device)
    run = Run(model, requests, config, work, deadline, log)
    run.note(f"{len(requests)} requests, model on {options.device} in {options.dtype}")
    count = options.prompts
    if given is None and count is not None:
        # Some of the drawn ones were alike or too long.
        count = min(count, len(requests))
    result = fit_model(run, own_cost(folder, source.meta), count)
    tensors = result.gates.tensors(run.adaptive)
    write_model(folder, target, result.section, result.cost, tensors)
    work.write_json(f"{LIGHT}/config.json", json.loads((target / "config.json").read_text(encoding="utf-8")))
    run.note(f"gates written to {target}")
    return target


def _drawn(options: FitOptions, source: ModelSource, config: PipelineConfig, work: WorkFolder) -> Requests:
    """Prompts of --data, drawn once and kept."""
    assert options.data is not None
    if not work.has("requests.npz"):
        longest = min(LONGEST, source.config.max_context - config.answer_tokens)
        count = options.prompts or DEFAULT_PROMPTS
        drawn = drawn_requests(options.data, load_tokenizer(source.tokenizer_dir), count, longest, options.seed)
        part = work.path / ".part-requests.npz"
        drawn.save(part)
        part.replace(work.path / "requests.npz")
    return Requests.load(work.path / "requests.npz")
