"""Claims in result files: a figure, and what it should be."""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass
from pathlib import Path

from morph.errors import CorruptFile

COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}


@dataclass(frozen=True)
class Claim:
    """A figure and what it should be.

    Attributes:
        id: dotted name, the same in every run.
        value: as measured.
        goal: a comparison with a number, as in `>= 2.0`.
    """

    id: str
    value: float
    goal: str

    @property
    def met(self) -> bool:
        """Whether the value reaches the goal.

        Raises:
            ValueError: the goal is not a comparison with a number.
        """
        sign, _, bound = self.goal.partition(" ")
        if sign not in COMPARISONS:
            raise ValueError(f"goal {self.goal!r} of {self.id}: write one of {' '.join(COMPARISONS)}, then a number")
        return bool(COMPARISONS[sign](self.value, float(bound)))


def read_results(folder: Path) -> dict[str, dict[str, object]]:
    """Content of the folder's JSON files by file name; files that are no objects are left out.

    Raises:
        CorruptFile: names the file that is no JSON.
    """
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CorruptFile(f"{file} is not readable ({error}); restore it or take it away") from error
        if isinstance(content, dict):
            found[file.name] = content
    return found


def claims_in(content: dict[str, object]) -> list[Claim]:
    """Claims of one result file."""
    stored = content.get("claims", [])
    entries = stored if isinstance(stored, list) else []
    return [Claim(entry["id"], entry["value"], entry["goal"]) for entry in entries]


def read_claims(folder: Path) -> list[tuple[str, Claim]]:
    """File name and claim, for all claims in the folder's JSON files."""
    return [(name, claim) for name, content in read_results(folder).items() for claim in claims_in(content)]
