"""Claims that a benchmark makes, and a table of all that the stored results support.

python -m benchmarks.claims
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from morph.evaluate.claims import Claim, read_claims

__all__ = ["RESULTS", "Claim", "claims_table", "read_claims"]

RESULTS = Path(__file__).parent / "results"


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
