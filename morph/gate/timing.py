"""A measured cost table: the engine itself, timed on this machine by layout, length and batch.

Whole requests run under the all-attention and the all-ssm layout, in turns. Embedding, norms, MLP and head cost the
same in both, so the difference is what the ssm saves: smooth in the length, where single times are not. The ssm's
column holds a block's share of its whole pass, the attention's that plus the smoothed difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from morph.config import EngineConfig
from morph.engine.engine import Engine
from morph.engine.load import load_engine
from morph.engine.params import SamplingParams
from morph.errors import InvalidRequest, MorphError
from morph.gate.cost import MIN_GRID, CostTable

DECODE_STEPS = 8
LAYOUTS = ("attention", "ssm")

Log = Callable[[str], None]


def needed_room(batch: int) -> int:
    """Tokens of context beyond the longest prompt: early members of a batch go on while later ones are prefilled."""
    return DECODE_STEPS + batch + 2


def prefill_lengths(longest: int) -> list[int]:
    """Prompt lengths that are timed: two per octave from 16 on."""
    lengths, n = [], float(MIN_GRID)
    while round(n) < longest:
        lengths.append(round(n))
        n *= 2**0.5
    return [*lengths, longest]


def _prompt(engine: Engine, n: int) -> list[int]:
    generator = torch.Generator().manual_seed(n)
    tokens: list[int] = torch.randint(engine.config.vocab_size, (n,), generator=generator).tolist()
    return tokens


def prefill_seconds(engine: Engine, n: int, layout: str) -> float:
    """Seconds from an idle engine to the first token of one prompt of `n` tokens."""
    params = SamplingParams(max_tokens=1, layout=layout, ignore_eos=True)
    request = engine.make_request("calibrate", _prompt(engine, n), params)
    engine.add(request)
    begin = time.perf_counter()
    while not engine.idle:
        engine.step()
    seconds = time.perf_counter() - begin
    if request.error:
        raise MorphError(f"timing a prompt of {n} tokens failed: {request.error}")
    return seconds


def decode_seconds(engine: Engine, n: int, batch: int, layout: str) -> float:
    """Seconds of a decode step of `batch` requests with about `n` tokens behind each, the best of some steps."""
    params = SamplingParams(max_tokens=needed_room(batch) - 1, layout=layout, ignore_eos=True)
    prompt = _prompt(engine, n)
    requests = [engine.make_request(f"calibrate-{i}", prompt, params) for i in range(batch)]
    for request in requests:
        engine.add(request)
    while any(request.first_token is None and not request.finished for request in requests):
        engine.step()
    best = float("inf")
    for _ in range(DECODE_STEPS):
        begin = time.perf_counter()
        engine.step()
        best = min(best, time.perf_counter() - begin)
    unfinished = all(not request.finished for request in requests)
    for request in requests:
        engine.abort(request.id)
    if not unfinished:
        raise MorphError(f"a batch of {batch} requests of {n} tokens did not decode together; give a smaller --batch")
    return best


def measure_costs(
    path: Path,
    dtype: Literal["float32", "bfloat16"],
    device: str,
    mean_answer: float,
    longest: int,
    batch: int,
    repeats: int,
    machine: dict[str, Any],
    log: Log,
) -> CostTable:
    """Time both layouts of the model at `path`.

    Args:
        mean_answer: M of the table. longest: longest timed prompt; beyond it costs grow with the length.
        batch: requests that share a decode step. repeats: runs per length; the best counts.
        machine: kept in the file, with a `name`.
    """
    config = EngineConfig(
        dtype=dtype, max_requests=batch, max_context=longest + needed_room(batch), prefill_tokens=1 << 30
    )
    loaded = load_engine(path, config, device)
    engine, kinds = loaded.engine, loaded.engine.config.block_kinds
    adaptive = sum(kind == "adaptive" for kind in kinds)
    lengths = prefill_lengths(longest)
    decode_at = sorted({*(n for n in (32, 128, 512, 1024, 2048) if n < longest), longest})
    prefill: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    decode: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    for n in lengths:
        # In turns, so that a slow moment of the machine does not count for one layout only; the first touches memory.
        runs = [[prefill_seconds(engine, n, layout) for layout in LAYOUTS] for _ in range(repeats + 1)][1:]
        best = [min(run[i] for run in runs) for i in range(2)]
        log(f"prefill of {n} tokens: attention {best[0] * 1e3:.2f} ms, ssm {best[1] * 1e3:.2f} ms")
        for layout, seconds in zip(LAYOUTS, best, strict=True):
            prefill[layout].append(seconds / adaptive)
    for n in decode_at:
        runs = [[decode_seconds(engine, n, batch, layout) for layout in LAYOUTS] for _ in range(repeats)]
        best = [min(run[i] for run in runs) for i in range(2)]
        log(f"decode step of {batch} at {n} tokens: attention {best[0] * 1e3:.2f} ms, ssm {best[1] * 1e3:.2f} ms")
        for layout, seconds in zip(LAYOUTS, best, strict=True):
            decode[layout].append(seconds / adaptive / batch)
    saved = smoothed(lengths, prefill["attention"], prefill["ssm"], lengths, 2)
    middle = [n + mean_answer / 2 for n in lengths]
    saved = saved + mean_answer * smoothed(decode_at, decode["attention"], decode["ssm"], middle, 1)
    # A state's size does not depend on the length.
    ssm = np.array(prefill["ssm"]) + mean_answer * float(np.median(decode["ssm"]))
    attention = np.maximum(ssm + saved, 0.0)
    facts = {
        **machine,
        "dtype": dtype,
        "kernels": engine.runner.kernels.name,
        "threads": torch.get_num_threads(),
        "batch": batch,
        "repeats": repeats,
        "prefill_lengths": lengths,
        "prefill_seconds_per_block": prefill,
        "decode_lengths": decode_at,
        "decode_seconds_per_block": decode,
    }
    return CostTable(
        lengths,
        [ssm if kind == "ssm" else attention for kind in kinds],
        [attention if kind == "attention" else ssm for kind in kinds],
        mean_answer,
        "measured",
        str(machine["name"]),
        facts,
    )


def smoothed(
    at: Sequence[int], attention: Sequence[float], ssm: Sequence[float], wanted: Sequence[float], degree: int
) -> npt.NDArray[np.float64]:
    """Seconds saved at the lengths `wanted`: a polynomial in the length through the measured differences.

    Errors count relative to the time of a pass, since that is what the noise of a difference is proportional to.
    """
    x, slow, fast = (np.array(values, dtype=np.float64) for values in (at, attention, ssm))
    fitted = np.polyfit(x, slow - fast, min(degree, len(x) - 1), w=1 / (slow + fast))
    return np.asarray(np.polyval(fitted, np.array(wanted, dtype=np.float64)), dtype=np.float64)


def check_longest(longest: int | None, default: int, context: int, batch: int) -> int:
    """The longest timed prompt: as asked, or the default where the context has room for it.

    Raises:
        InvalidRequest: the model's context is too short.
    """
    room = context - needed_room(batch)
    chosen = min(default, room) if longest is None else longest
    if not MIN_GRID < chosen <= room:
        raise InvalidRequest(
            f"a timed prompt of {chosen} tokens does not fit the model's context of {context} with a batch of {batch}; "
            f"give --longest from {MIN_GRID + 1} to {room}"
        )
    return chosen
