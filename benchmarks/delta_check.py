"""What int8 costs the shipped delta: KL to the base and cross-entropy on text, against the delta as it was trained.

    python -m benchmarks.delta_check --delta first-delta.safetensors --text wikitext2/test.jsonl.gz

Both deltas run on the same windows and the same layouts: all-ssm; 4, 8 and 15 attention blocks at the most sensitive
places (the ranking that the gates were fitted with); 8, 15 and 22 at places drawn anew for each window. Float32 on the
CPU; two to three minutes per window on one core.
"""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.claims import RESULTS
from benchmarks.report import header, write_results
from morph.checkpoint import ChatTokenizer, ModelSource, load_tokenizer, open_model
from morph.checkpoint.delta import read_first_delta
from morph.hub import resolve_model
from morph.model.model import MorphModel

SPEECHES = Path(__file__).parent / "data" / "us_presidential_speeches.txt.gz"
RANKING = RESULTS / "gates_r1.json"
STATIC_BLOCKS = (4, 8, 15)
RANDOM_BLOCKS = (8, 15, 22)
DELTAS = ("exact", "int8")
GOAL = 0.02
"""Nats that the packed delta may differ from the trained one."""


class TrainedDelta:
    """A model folder with its delta replaced."""

    def __init__(self, source: ModelSource, delta: dict[str, torch.Tensor]) -> None:
        self.source, self.delta = source, delta

    def has(self, name: str) -> bool:
        """True when the model has the tensor."""
        return self.source.has(name)

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The trained tensor where there is one, else the folder's."""
        return self.delta[name].to(dtype) if name in self.delta else self.source.get(name, dtype)


def documents(path: Path) -> list[str]:
    """Texts of a `.jsonl.gz` file (field `text`) or of a `.txt.gz` file (separated by a line `<|doc|>`)."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        if path.name.endswith(".jsonl.gz"):
            return [json.loads(line)["text"] for line in file]
        return file.read().split("<|doc|>")


def windows_of(path: Path, tokenizer: ChatTokenizer, count: int, length: int, separator: int) -> torch.Tensor:
    """The last documents of a file as `[count, length]` token ids, each document followed by the separator."""
    ids: list[int] = []
    for text in reversed(documents(path)):
        ids = [*tokenizer.encode(text.strip(), add_special_tokens=False), separator, *ids]
        if len(ids) >= count * length:
            return torch.tensor(ids[-count * length :]).view(count, length)
    raise typer.BadParameter(f"{path} has {len(ids)} tokens, {count} windows of {length} need more")


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Nats per token of `tokens` `[length]` under `logits` `[length, vocab]`."""
    return float(torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]))


def divergence(base: torch.Tensor, logits: torch.Tensor) -> float:
    """KL(base || model) in nats per position, both `[length, vocab]`; in pieces, to bound memory."""
    total = 0.0
    for p, q in zip(base.split(256), logits.split(256), strict=True):
        p, q = p.log_softmax(-1), q.log_softmax(-1)
        total += float((p.exp() * (p - q)).sum())
    return total / base.shape[0]


def read_ranking(path: Path) -> list[int]:
    """Blocks from the most to the least sensitive, the field `ranking` of a JSON file.

    Raises:
        typer.BadParameter: it has none.
    """
    ranking = json.loads(path.read_text()).get("ranking")
    if not isinstance(ranking, list) or sorted(ranking) != list(range(len(ranking))):
        raise typer.BadParameter(f"{path} has no `ranking` that names every block once; give --ranking another file")
    return [int(block) for block in ranking]


def layouts_of(ranking: list[int], rng: random.Random) -> dict[str, torch.Tensor]:
    """Layouts by name, bool `[blocks]`; the random ones are drawn from `rng`."""
    blocks = len(ranking)
    places: dict[str, list[int]] = {"ssm": []}
    places |= {f"static{count}": ranking[:count] for count in STATIC_BLOCKS}
    places |= {f"random{count}": rng.sample(range(blocks), count) for count in RANDOM_BLOCKS}
    layouts = {}
    for name, attention in places.items():
        layouts[name] = torch.zeros(blocks, dtype=torch.bool)
        layouts[name][attention] = True
    return layouts


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean, to 5 digits."""
    numbers = list(values)
    return round(sum(numbers) / len(numbers), 5)


@torch.no_grad()
def measure(
    models: dict[str, MorphModel], windows: list[tuple[str, torch.Tensor]], ranking: list[int], seed: int
) -> list[dict[str, Any]]:
    """One row per window: base cross-entropy; KL and cross-entropy by layout and delta."""
    rng = random.Random(seed)
    rows = []
    for number, (text, tokens) in enumerate(windows, 1):
        begin = time.perf_counter()
        base = next(iter(models.values()))(tokens[None])[0]
        row: dict[str, Any] = {"text": text, "base_ce": round(cross_entropy(base, tokens), 5), "layouts": {}}
        for layout_name, layout in layouts_of(ranking, rng).items():
            cell = row["layouts"][layout_name] = {}
            for name, model in models.items():
                logits = model(tokens[None], layout)[0]
                cell[name] = {
                    "kl": round(divergence(base, logits), 5), "ce": round(cross_entropy(logits, tokens), 5)
                }  # fmt: skip
        rows.append(row)
        seconds = time.perf_counter() - begin
        typer.echo(f"window {number} of {len(windows)} ({text}): {seconds:.0f} s", err=True)
    return rows


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over windows: base cross-entropy, and KL and cross-entropy by layout and delta."""
    layouts = {
        layout: {
            name: {key: mean(row["layouts"][layout][name][key] for row in rows) for key in ("kl", "ce")}
            for name in DELTAS
        }
        for layout in rows[0]["layouts"]
    }
    return {"windows": len(rows), "base_ce": mean(row["base_ce"] for row in rows), "layouts": layouts}


def claims_of(figures: dict[str, Any], rows: list[dict[str, Any]], revision: str) -> list[dict[str, Any]]:
    """The distance between the deltas per layout, in KL or cross-entropy, whichever is larger; absolute values of
    means, then the largest one of a single window."""

    def distance(cell: dict[str, dict[str, float]]) -> float:
        return max(abs(cell["int8"][key] - cell["exact"][key]) for key in ("kl", "ce"))

    values = {layout: distance(cell) for layout, cell in figures["layouts"].items()}
    values["worst_window"] = max(distance(cell) for row in rows for cell in row["layouts"].values())
    prefix = f"model.{revision}.delta.text"
    return [
        {"id": f"{prefix}.{name}.int8_minus_exact", "value": round(value, 5), "goal": f"<= {GOAL}"}
        for name, value in values.items()
    ]


def main(
    delta: Annotated[Path, typer.Option("--delta", help="The delta as trained, before packing.")],
    model: Annotated[str, typer.Option("--model", help="Name or folder.")] = "smollm2-135m@r1",
    text: Annotated[list[Path] | None, typer.Option("--text", help="A .jsonl.gz or .txt.gz file; repeatable.")] = None,
    windows: Annotated[int, typer.Option("--windows", help="Per file.")] = 1,
    length: Annotated[int, typer.Option("--length", help="Tokens per window.")] = 2048,
    ranking: Annotated[
        Path, typer.Option("--ranking", help="JSON file whose `ranking` orders the blocks by sensitivity.")
    ] = RANKING,
    seed: Annotated[int, typer.Option("--seed", help="For the random places of the attention blocks.")] = 0,
    results: Annotated[Path, typer.Option("--results", help="Folder for the JSON file.")] = RESULTS,
) -> None:
    """Compare the packed delta of a model with the delta as trained."""
    folder = resolve_model(model)
    source, tokenizer = open_model(folder), load_tokenizer(folder)
    trained = TrainedDelta(source, read_first_delta(delta))
    models = {
        "exact": MorphModel.from_source(trained, source.config),
        "int8": MorphModel.from_source(source, source.config),
    }
    separator = 0  # <|endoftext|>
    files = text or [SPEECHES]
    cut = [
        (f"{path.parent.name}/{path.name}", window)
        for path in files
        for window in windows_of(path, tokenizer, windows, length, separator)
    ]
    order = read_ranking(ranking)
    if len(order) != source.config.num_blocks:
        raise typer.BadParameter(f"{ranking} ranks {len(order)} blocks, the model has {source.config.num_blocks}")
    rows = measure(models, cut, order, seed)
    figures = summarise(rows)
    revision = str(source.meta.get("revision"))
    content = {
        **header(),
        "length": length,
        "dtype": "float32",
        "ranking": order,
        "figures": figures,
        "windows": rows,
        "claims": claims_of(figures, rows, revision),
    }
    table = Table("layout", "KL exact", "KL int8", "CE exact", "CE int8", title=f"base CE {figures['base_ce']:.3f}")
    for layout, cell in figures["layouts"].items():
        exact, packed = cell["exact"], cell["int8"]
        table.add_row(layout, *(f"{x:.4f}" for x in (exact["kl"], packed["kl"], exact["ce"], packed["ce"])))
    Console().print(table)
    Console().print(f"written to {write_results(results, f'delta_{revision}', content)}")


if __name__ == "__main__":
    typer.run(main)
