"""What `morph calibrate` does: time the mixers, find τ of every budget under the new table, write both."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

import morph
from morph.checkpoint import open_model
from morph.checkpoint.tokenizer import load_tokenizer
from morph.errors import InvalidRequest
from morph.gate.answers import Requests
from morph.gate.calibrate import calibrate, gated_layouts, saved_matrix, tau_section
from morph.gate.collect import force_rules, measure
from morph.gate.command import BATCH_TOKENS, DTYPES, LONGEST, check_device, one_source
from morph.gate.fit import GateStack
from morph.gate.folder import check_model, check_target, write_model
from morph.gate.policy import Gates
from morph.gate.prompts import drawn_requests, given_requests
from morph.gate.timing import check_longest, measure_costs
from morph.hub import resolve_model
from morph.model.model import MorphModel

LONGEST_TIMED = 4096


@dataclass(frozen=True)
class CalibrateOptions:
    """Options of `morph calibrate`."""

    model: str
    data: Path | None
    requests: Path | None
    prompts: int
    longest: int | None
    batch: int
    repeats: int
    rounds: int
    answer_tokens: float | None
    out: Path | None
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    seed: int


def machine_facts(device: str) -> dict[str, Any]:
    """What a measured table says about where and with what it was made."""
    name = platform.processor() or platform.machine()
    if device == "cuda":
        name = torch.cuda.get_device_name()
    elif Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"morph": morph.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def calibrate_command(options: CalibrateOptions, log: Callable[[str], None]) -> Path:
    """Measure and write; returns the folder.

    Raises:
        InvalidRequest, UnsupportedModel, ModelNotFound: before anything is timed.
    """
    one_source(options.data, options.requests)
    check_device(options.device)
    folder = resolve_model(options.model)
    source = open_model(folder)
    config = source.config
    check_model(folder, source.meta, config.is_adaptive)
    gates = Gates.load(source)
    target = check_target(folder, options.out)
    longest = check_longest(options.longest, LONGEST_TIMED, config.max_context, options.batch)
    if options.requests is not None:
        requests = _some(given_requests(options.requests, config), options.prompts, options.seed)
    else:
        assert options.data is not None
        most = min(LONGEST, config.max_context)
        tokenizer = load_tokenizer(source.tokenizer_dir)
        requests = drawn_requests(options.data, tokenizer, options.prompts, most, options.seed)
    answers = [len(answer) for answer in requests.answers if answer]
    mean_answer = options.answer_tokens
    if mean_answer is None:
        mean_answer = sum(answers) / len(answers) if answers else gates.cost.mean_answer_tokens
    cost = measure_costs(
        folder,
        options.dtype,
        options.device,
        mean_answer,
        longest,
        options.batch,
        options.repeats,
        machine_facts(options.device),
        log,
    )
    saved = saved_matrix(cost, requests.lengths)
    if not bool((saved > 0).any()):
        raise InvalidRequest(
            "on this machine the ssm saves nothing for any of these prompts, so there is no budget to calibrate and "
            "nothing was written; give longer prompts"
        )
    model = MorphModel.from_source(source, config, DTYPES[options.dtype], options.device)
    stack, ids, batch_tokens = GateStack.of(gates.weights), list(range(len(requests))), BATCH_TOKENS[options.device]
    # A first guess of û: what the gates say under the choices of the old table's middle budget.
    middle = force_rules(torch.zeros(len(ids), 1, config.num_blocks) + gates.tau_of(0.5) * saved[:, None], config)
    first = measure(
        model,
        requests,
        [(r, middle[r]) for r in ids],
        stack.to(model.embedding.weight.device),
        batch_tokens=batch_tokens,
        losses=False,
    )
    if first.utilities is None:
        raise InvalidRequest("the gates gave no û; fit them again with `morph gate fit`")
    log(f"û of {len(ids)} prompts; letting the gates choose under new thresholds")
    tau, _ = calibrate(
        lambda rules: gated_layouts(model, requests, stack, ids, rules, batch_tokens),
        first.utilities,
        saved,
        rounds=options.rounds,
    )
    section = source.meta["gate"] | tau_section(tau, cost)
    if "kinds" in section:
        # Counts by budget were those of the old table.
        section["kinds"] = {
            kind: {key: value for key, value in entry.items() if key != "attention_blocks"}
            for kind, entry in section["kinds"].items()
        }
    write_model(folder, target, section, cost)
    log(f"cost table and thresholds written to {target}")
    return target


def _some(requests: Requests, count: int, seed: int) -> Requests:
    """Up to `count` of the requests that may be used, drawn at random; never the split `eval`."""
    usable = requests.where("train", "held")
    if len(usable) < 2:
        raise InvalidRequest(f"{len(usable)} usable requests are too few; splits `train` and `held` count")
    order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    chosen = [usable[i] for i in order]
    return Requests(
        [requests.prompts[i] for i in chosen],
        [requests.kinds[i] for i in chosen],
        [requests.splits[i] for i in chosen],
        [requests.answers[i] for i in chosen] if requests.answers else [],
    )
