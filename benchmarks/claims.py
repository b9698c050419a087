"""Claims that a benchmark makes, and a table of all that the stored results support.

python -m benchmarks.claims
"""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

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


def read_claims(folder: Path) -> list[tuple[str, Claim]]:
    """File name and claim, for all claims in the folder's JSON files."""
    found = []
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        stored = content.get("claims", []) if isinstance(content, dict) else []
        found += [(file.name, Claim(entry["id"], entry["value"], entry["goal"])) for entry in stored]
    return found


def claims_table(claims: list[tuple[str, Claim]]) -> Table:
    """Claims as a table for the terminal."""
    table = Table("claim", "value", "goal", "", "from", title="Claims")
    for file, claim in claims:
        verdict = "[green]met[/green]" if claim.met else "[red]unmet[/red]"
        table.add_row(claim.id, f"{claim.value:.3g}", claim.goal, verdict, file)
    return table


def main(
    results: Annotated[Path, typer.Option("--results", help="Folder of result files.")] = RESULTS,
) -> None:
    """Print every claim of the stored results, with its value, its goal and whether it is met."""
    claims = read_claims(results)
    Console().print(claims_table(claims) if claims else f"no claims in {results}")


if __name__ == "__main__":
    typer.run(main)
