"""Seconds that attention costs over the ssm, per block and prompt length: what a budget is counted in.

A table is a grid of prompt lengths with two arrays of seconds per block: a request of that length that runs attention
in the block, and one that runs the ssm there, prefill plus the decode steps of a mean answer. The default is
computed from operations and bytes over a device's rates; a measured one has the same shape. It is a versioned file
and part of the model's identity, never timed at start, so that layouts are reproducible.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from morph.config import ModelConfig
from morph.errors import CorruptFile, UnsupportedModel

COST_VERSION = 1
"""Version of the cost table file; raised when an older reader would misread a newer file."""

MIN_GRID, GRID_STEPS_PER_OCTAVE = 16, 4


@dataclass(frozen=True)
class DeviceRates:
    """What a device sustains, for the analytic table.

    Attributes:
        flops: matrix operations per second (a multiply-add counts as two).
        bytes_per_second: memory bandwidth.
        weight_bytes: bytes per weight. kv_bytes: bytes per cached key or value element.
        decode_batch: requests that share one read of the weights in a decode step.
    """

    name: str
    flops: float
    bytes_per_second: float
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    decode_batch: int = 8


CPU_RATES = DeviceRates("cpu", flops=4e11, bytes_per_second=4e10)
"""A few cores of a current server or desktop processor: the ratio of the two rates is what shapes a layout."""


@dataclass(frozen=True)
class MixerWork:
    """Operations and bytes of one mixer in one block.

    Attributes:
        macs_per_token: multiply-adds that do not depend on the position.
        macs_per_key: multiply-adds per key that a token attends to.
        weights: number of weights. state_bytes: memory moved per decode step that does not depend on the position.
        bytes_per_key: memory read per key in a decode step.
    """

    macs_per_token: float
    macs_per_key: float
    weights: float
    state_bytes: float
    bytes_per_key: float

    def prefill_seconds(self, n: float, rates: DeviceRates) -> float:
        """Seconds for a prompt of `n` tokens; one head's keys and values stay in cache, so they are read once."""
        macs = n * self.macs_per_token + 0.5 * n * (n + 1) * self.macs_per_key
        read = self.weights * rates.weight_bytes + n * self.bytes_per_key + self.state_bytes
        return max(2.0 * macs / rates.flops, read / rates.bytes_per_second)

    def decode_seconds(self, n: float, rates: DeviceRates) -> float:
        """Seconds of one request's share of one decode step with `n` tokens behind it."""
        macs = self.macs_per_token + n * self.macs_per_key
        read = self.weights * rates.weight_bytes / rates.decode_batch + n * self.bytes_per_key + self.state_bytes
        return max(2.0 * macs / rates.flops, read / rates.bytes_per_second)

    def request_seconds(self, n: float, answer: float, rates: DeviceRates) -> float:
        """prefill(n) + M · decode(n + M/2)."""
        return self.prefill_seconds(n, rates) + answer * self.decode_seconds(n + answer / 2, rates)


def mixer_work(config: ModelConfig, rates: DeviceRates) -> tuple[MixerWork, MixerWork]:
    """Work of the attention and of the ssm mixer of one block (training.md's counts, from the shapes)."""
    d, q, kv, head = config.hidden_size, config.q_size, config.kv_size, config.head_dim
    projections = d * config.qkv_size + q * d
    kv_row = 2 * kv * rates.kv_bytes
    attention = MixerWork(projections, 2 * q, projections, kv_row, kv_row)
    ssm = config.ssm
    if ssm is None:
        return attention, attention
    states = config.num_state_heads
    small = d * (2 * states + ssm.gate_rank) + ssm.gate_rank * q
    # Per state: k^T S, the rank-one update and, per query head, q^T S.
    recurrence = head * head * (2 * states + config.num_heads)
    window = min(ssm.window, config.max_context)
    state = 2 * 4 * states * head * head + 2 * 4 * (ssm.conv_width - 1) * config.qkv_size + window * kv_row
    macs = projections + small + ssm.conv_width * config.qkv_size + recurrence + 2 * q * window
    return attention, MixerWork(macs, 0.0, projections + small, state, 0.0)


def length_grid(longest: int) -> tuple[int, ...]:
    """Prompt lengths from 16 to at least `longest`, four per octave."""
    octaves = math.log2(max(longest, 2 * MIN_GRID) / MIN_GRID)
    steps = math.ceil(octaves * GRID_STEPS_PER_OCTAVE - 1e-9)
    return tuple(round(MIN_GRID * 2 ** (i / GRID_STEPS_PER_OCTAVE)) for i in range(steps + 1))


KEPT_LENGTHS = 256
"""Prompt lengths whose savings are kept."""


class CostTable:
    """Seconds per block and prompt length.

    Args:
        lengths: prompt lengths in tokens, strictly ascending, at least two.
        attention, ssm: seconds `[blocks, lengths]`, prefill + decode of a mean answer. A static block has the same
            values in both, so that nothing is saved there.
        mean_answer_tokens: M of the decode term.
        source: how it was made, e.g. `analytic` or `measured`. device: what it stands for.
        rates: the analytic table's rates, kept for the reader.

    Raises:
        CorruptFile: shapes or values that make no table.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        attention: npt.ArrayLike,
        ssm: npt.ArrayLike,
        mean_answer_tokens: float,
        source: str,
        device: str,
        rates: dict[str, Any] | None = None,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.attention = np.asarray(attention, dtype=np.float64)
        self.ssm = np.asarray(ssm, dtype=np.float64)
        self.mean_answer_tokens = float(mean_answer_tokens)
        self.source, self.device, self.rates = source, device, rates
        self.flops_per_second = float((rates or {}).get("flops", CPU_RATES.flops))
        self._check()
        self._saved: dict[int, list[float]] = {}
        self._log_lengths = np.log(self.lengths.astype(np.float64))

    def _check(self) -> None:
        lengths, shape = self.lengths, (self.attention.shape[0], len(self.lengths))
        if lengths.ndim != 1 or len(lengths) < 2 or lengths[0] < 1 or np.any(np.diff(lengths) <= 0):
            raise CorruptFile(f"cost table lengths are {lengths.tolist()}; give at least two, ascending, from 1 on")
        for name, array in (("attention", self.attention), ("ssm", self.ssm)):
            if array.ndim != 2 or array.shape != shape:
                raise CorruptFile(f"cost table array {name!r} has shape {array.shape}, want {shape} (blocks, lengths)")
            if not np.all(np.isfinite(array)) or np.any(array < 0):
                raise CorruptFile(f"cost table array {name!r} has a value that is no time; make the table again")
        if not math.isfinite(self.mean_answer_tokens) or self.mean_answer_tokens < 0:
            raise CorruptFile(f"cost table mean_answer_tokens is {self.mean_answer_tokens}, want a number >= 0")

    @classmethod
    def analytic(
        cls, config: ModelConfig, rates: DeviceRates = CPU_RATES, mean_answer_tokens: float = 64.0
    ) -> CostTable:
        """Operations and bytes over the device's rates, on a grid up to the model's longest context."""
        lengths = length_grid(config.max_context)
        work = mixer_work(config, rates)
        seconds = [[mixer.request_seconds(n, mean_answer_tokens, rates) for n in lengths] for mixer in work]
        rows_attention, rows_ssm = [], []
        for kind in config.block_kinds:
            rows_attention.append(seconds[1] if kind == "ssm" else seconds[0])
            rows_ssm.append(seconds[0] if kind == "attention" else seconds[1])
        return cls(lengths, rows_attention, rows_ssm, mean_answer_tokens, "analytic", rates.name, asdict(rates))

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return int(self.attention.shape[0])

    def attention_seconds(self, block: int, n: int) -> float:
        """Seconds of attention in `block` for a prompt of `n` tokens and a mean answer."""
        return self._interpolate(self.attention[block], n)

    def ssm_seconds(self, block: int, n: int) -> float:
        """Seconds of the ssm in `block` for a prompt of `n` tokens and a mean answer."""
        return self._interpolate(self.ssm[block], n)

    def saved_seconds(self, block: int, n: int) -> float:
        """c_l(n): what the ssm saves over attention; <= 0 where attention is cheaper, 0 in a static block."""
        saved = self._saved.get(n)
        if saved is None:
            # All blocks of a request ask for the same length, one after the other.
            if len(self._saved) >= KEPT_LENGTHS:
                self._saved.clear()
            saved = [self._interpolate(a - s, n) for a, s in zip(self.attention, self.ssm, strict=True)]
            self._saved[n] = saved
        return saved[block]

    def _interpolate(self, values: npt.NDArray[np.float64], n: int) -> float:
        """Linear in log n between grid points; the first value below the grid, proportional to n beyond it."""
        if n < 1:
            raise ValueError(f"prompt length is {n}, want >= 1")
        if n >= self.lengths[-1]:
            return float(values[-1] * (n / self.lengths[-1]))
        return float(np.interp(math.log(n), self._log_lengths, values))

    # ---- file

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads it back to the same fingerprint."""
        return {
            "format": "morph-cost-table",
            "version": COST_VERSION,
            "source": self.source,
            "device": self.device,
            "rates": self.rates,
            "mean_answer_tokens": self.mean_answer_tokens,
            "lengths": self.lengths.tolist(),
            "attention": self.attention.tolist(),
            "ssm": self.ssm.tolist(),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CostTable:
        """Read what `to_dict` wrote.

        Raises:
            UnsupportedModel: another version. CorruptFile: no cost table.
        """
        if data.get("format") != "morph-cost-table":
            raise CorruptFile(f"cost table has format {data.get('format')!r}, want 'morph-cost-table'")
        if data.get("version") != COST_VERSION:
            raise UnsupportedModel(
                f"cost table has version {data.get('version')!r}, this Morph reads {COST_VERSION}; "
                "make the table again with `morph calibrate`, or use a Morph of its time"
            )
        try:
            return cls(
                data["lengths"],
                data["attention"],
                data["ssm"],
                data["mean_answer_tokens"],
                data["source"],
                data["device"],
                data.get("rates"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFile(f"cost table is not readable ({error}); make it again") from error

    def save(self, path: str | Path) -> None:
        """Write the JSON file."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a JSON file.

        Raises:
            CorruptFile: missing or not JSON. UnsupportedModel: another version.
        """
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise CorruptFile(f"cost table {path} is not readable ({error}); restore it or make it again") from error
        if not isinstance(data, dict):
            raise CorruptFile(f"cost table {path} is no JSON object; make it again")
        return cls.from_dict(data)

    def fingerprint(self) -> str:
        """sha256 of the values that decide layouts: part of the model's identity for caching."""
        identity = {
            key: value
            for key, value in self.to_dict().items()
            if key in ("version", "mean_answer_tokens", "lengths", "attention", "ssm")
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
