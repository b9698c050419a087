"""The evaluation sets and the suites made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from morph.errors import InvalidRequest
from morph.evaluate.forms import (
    LONG,
    Draw,
    boolq_long,
    many_shot,
    many_shot_summary,
    short_choices,
    short_summary,
    squad,
    squad_long,
)
from morph.evaluate.items import Item
from morph.evaluate.long_prompts import key_value, minilongbench, passkey, qmsum


@dataclass(frozen=True)
class Dataset:
    """A set of items and how they are judged.

    Attributes:
        kind: `reasoning`, `qa`, `summary` or `retrieval`: the kind of request.
        metrics: names, each 0…1 per item. primary: the one that comparisons use.
        build: makes the items.
        uneven: prompts are as long as they are; those that do not fit the context are left out before counting.
    """

    name: str
    kind: str
    metrics: tuple[str, ...]
    primary: str
    build: Callable[[Draw], list[Item]]
    uneven: bool = False

    @property
    def scored(self) -> bool:
        """Choices are scored, rather than answers written."""
        return "acc" in self.metrics


CHOICE = ("acc", "acc_norm")
WRITTEN = ("em", "f1")
ROUGE = ("rouge1", "rouge2", "rougeL")

DATASETS = {
    dataset.name: dataset
    for dataset in (
        Dataset("arc_challenge", "reasoning", CHOICE, "acc_norm", short_choices("arc_challenge")),
        Dataset("hellaswag", "reasoning", CHOICE, "acc_norm", short_choices("hellaswag")),
        Dataset("openbookqa", "reasoning", CHOICE, "acc_norm", short_choices("openbookqa")),
        Dataset("boolq", "qa", CHOICE, "acc", short_choices("boolq")),
        Dataset("squad", "qa", WRITTEN, "f1", squad),
        Dataset("dialogsum", "summary", ROUGE, "rougeL", short_summary("dialogsum")),
        Dataset("scitldr", "summary", ROUGE, "rougeL", short_summary("scitldr")),
        Dataset("arc_challenge_long", "reasoning", CHOICE, "acc_norm", many_shot("arc_challenge")),
        Dataset("hellaswag_long", "reasoning", CHOICE, "acc_norm", many_shot("hellaswag")),
        Dataset("openbookqa_long", "reasoning", CHOICE, "acc_norm", many_shot("openbookqa")),
        Dataset("boolq_long", "qa", CHOICE, "acc", boolq_long),
        Dataset("squad_long", "qa", WRITTEN, "f1", squad_long),
        Dataset("dialogsum_long", "summary", ROUGE, "rougeL", many_shot_summary("dialogsum")),
        Dataset("scitldr_long", "summary", ROUGE, "rougeL", many_shot_summary("scitldr")),
        Dataset("passkey", "retrieval", ("contains",), "contains", passkey("squad")),
        Dataset("key_value", "retrieval", ("contains",), "contains", key_value),
        Dataset("passkey_made", "retrieval", ("contains",), "contains", passkey("scitldr")),
        Dataset("qmsum", "summary", ROUGE, "rougeL", qmsum, uneven=True),
        Dataset("minilongbench", "mixed", ("score",), "score", minilongbench, uneven=True),
    )
}

SIX = ("arc_challenge", "hellaswag", "boolq", "squad", "dialogsum", "scitldr")


@dataclass(frozen=True)
class Suite:
    """Sets that are run together.

    Attributes:
        counts: items at most of each set; None = all.
        lengths: of the long forms.
        packaged: the package's own samples are enough.
    """

    counts: dict[str, int | None]
    lengths: tuple[int, int] = LONG
    packaged: bool = False


SUITES = {
    "six": Suite({name: None for short in SIX for name in (short, f"{short}_long")}),
    "six-short": Suite(dict.fromkeys(SIX)),
    "six-long": Suite({f"{name}_long": None for name in SIX}),
    "long": Suite({"passkey": 100, "key_value": 100, "qmsum": None, "minilongbench": None}, (2000, 7000)),
    "quick": Suite(
        {
            "hellaswag": 40,
            "openbookqa": 40,
            "openbookqa_long": 5,
            "scitldr": 12,
            "scitldr_long": 5,
            "passkey_made": 8,
        },
        (1600, 2600),
        packaged=True,
    ),
}


def dataset(name: str) -> Dataset:
    """The set of that name.

    Raises:
        InvalidRequest: unknown; lists the known ones.
    """
    if name not in DATASETS:
        raise InvalidRequest(f"set {name!r} is unknown; use one of {', '.join(DATASETS)}", "datasets")
    return DATASETS[name]
