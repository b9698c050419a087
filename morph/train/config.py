"""Settings of a training run: the package's defaults, a TOML file over them, single keys over that."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from morph.errors import InvalidRequest, ModelNotFound


@dataclass(frozen=True)
class RunConfig:
    """See `data/distill.toml`."""

    seed: int
    dtype: str
    compile: bool | str
    graphs: bool
    log_every: int
    checkpoint_seconds: float
    keep: int
    held_out_rows: int


@dataclass(frozen=True)
class StageConfig:
    """What both stages have; see `data/distill.toml`."""

    tokens: int
    tokens_per_step: int
    micro_tokens: int
    lr: float
    final_lr: float
    vector_lr: float
    warmup: int
    clip: float
    ema: float
    start: float
    lengths: tuple[tuple[float, int], ...]

    @property
    def passes(self) -> int:
        """Layouts that every token is run under."""
        return 1

    @property
    def steps(self) -> int:
        """Steps of the whole stage."""
        return max(1, round(self.tokens / self.tokens_per_step))

    @property
    def first_step(self) -> int:
        """Step that a fresh run begins with."""
        return int(self.start * self.steps)

    def length(self, step: int) -> int:
        """Tokens per sequence in a step."""
        done, total = 0.0, sum(share for share, _ in self.lengths)
        for share, length in self.lengths:
            done += share / total
            if step < done * self.steps:
                return length
        return self.lengths[-1][1]

    def rows(self, step: int) -> int:
        """Sequences in a step, over all devices."""
        return max(1, self.tokens_per_step // (self.length(step) * self.passes))


@dataclass(frozen=True)
class DistillConfig(StageConfig):
    """What distillation has besides; see `data/distill.toml`."""

    layouts: int
    hidden_weight: float
    hidden_final: float
    hidden_every: int
    answer_weight: float
    kl_chunk: int
    ranking_every: float
    evaluate_every: float

    @property
    def passes(self) -> int:
        """Layouts that every token is run under."""
        return self.layouts


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run."""

    run: RunConfig
    align: StageConfig
    distill: DistillConfig

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


SECTIONS: dict[str, type] = {"run": RunConfig, "align": StageConfig, "distill": DistillConfig}


def load_config(file: Path | None = None, changes: Sequence[str] = ()) -> TrainConfig:
    """Defaults, then the file, then `section.key=value` changes.

    Raises:
        ModelNotFound: no such file. InvalidRequest: TOML that cannot be read, an unknown key, a value out of range.
    """
    values = tomllib.loads((resources.files("morph.train") / "data" / "distill.toml").read_text(encoding="utf-8"))
    if file is not None:
        if not file.is_file():
            raise ModelNotFound(f"no configuration file {file}")
        try:
            own = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{file} is no TOML ({error})") from error
        for section, keys in own.items():
            if not isinstance(keys, dict):
                raise InvalidRequest(f"{file}: {section!r} stands outside of {', '.join(SECTIONS)}; put it into one")
            for key, value in keys.items():
                _put(values, section, key, value, str(file))
    for change in changes:
        name, equals, text = change.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot):
            raise InvalidRequest(f"--set {change!r} is not of the form section.key=value, e.g. distill.lr=3e-4")
        _put(values, section, key, _parse(text), f"--set {change}")
    return TrainConfig(
        RunConfig(**values["run"]), StageConfig(**_stage(values["align"])), DistillConfig(**_stage(values["distill"]))
    )


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(values: dict[str, Any], section: str, key: str, value: Any, where: str) -> None:
    if section not in SECTIONS:
        raise InvalidRequest(f"{where}: there is no section {section!r}; known: {', '.join(SECTIONS)}")
    known = [field.name for field in fields(SECTIONS[section])]
    if key not in known:
        raise InvalidRequest(f"{where}: [{section}] has no key {key!r}; known: {', '.join(known)}")
    old = values[section][key]
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(old, int) and not isinstance(old, bool) and isinstance(value, float) and value.is_integer():
        value = int(value)
    if key != "compile" and (type(value) is not type(old)):
        raise InvalidRequest(f"{where}: [{section}] {key} is {value!r}, want a value like {old!r}")
    values[section][key] = value


def _stage(values: dict[str, Any]) -> dict[str, Any]:
    """Checked values of a stage, with `lengths` as tuples."""
    lengths = values["lengths"]
    good = (
        isinstance(lengths, list)
        and lengths
        and all(
            isinstance(pair, list) and len(pair) == 2 and pair[0] > 0 and isinstance(pair[1], int) and pair[1] >= 2
            for pair in lengths
        )
    )
    if not good:
        raise InvalidRequest(f"lengths is {lengths!r}, want pairs like [[0.7, 512], [0.3, 4096]]")
    for key in ("tokens", "tokens_per_step", "micro_tokens", "lr", "vector_lr", "clip"):
        if not values[key] > 0:
            raise InvalidRequest(f"{key} is {values[key]!r}, want a positive number")
    for key in ("ema", "start"):
        if not 0 <= values[key] < 1:
            raise InvalidRequest(f"{key} is {values[key]!r}, want 0 <= {key} < 1")
    for key in ("layouts", "kl_chunk", "hidden_every"):
        if key in values and values[key] < 1:
            raise InvalidRequest(f"{key} is {values[key]!r}, want at least 1")
    return values | {"lengths": tuple((float(share), int(length)) for share, length in lengths)}
