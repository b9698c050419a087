"""What int8 costs the shipped delta: KL to the base and cross-entropy on text, against the delta as it was trained.

    python -m benchmarks.delta_check --delta first-delta.safetensors --text wikitext2/test.jsonl.gz

Both deltas run on the same windows and the same layouts: all-ssm, and 8, 15 and 22 attention blocks at places drawn
anew for each window. Float32 on the CPU; about a minute per window on two cores.
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
ATTENTION_BLOCKS = (0, 8, 15, 22)
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


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean, to 5 digits."""
    numbers = list(values)
    return round(sum(numbers) / len(numbers), 5)


@torch.no_grad()
def measure(
    models: dict[str, MorphModel], windows: list[tuple[str, torch.Tensor]], seed: int
) -> list[dict[str, Any]]:
    """One row per window: base cross-entropy, and KL and cross-entropy of each delta at each attention count."""
    rng = random.Random(seed)
    rows = []
    for number, (text, tokens) in enumerate(windows, 1):
        begin = time.perf_counter()
        any_model = next(iter(models.values()))
        blocks = any_model.config.num_blocks
        base = any_model(tokens[None])[0]
        row: dict[str, Any] = {"text": text, "base_ce": cross_entropy(base, tokens)}
        for count in ATTENTION_BLOCKS:
            layout = torch.zeros(blocks, dtype=torch.bool)
            layout[rng.sample(range(blocks), count)] = True
            for name, model in models.items():
                logits = model(tokens[None], layout)[0]
                row[f"{name}.{count}"] = (divergence(base, logits), cross_entropy(logits, tokens))
        rows.append(row)
        seconds = time.perf_counter() - begin
        typer.echo(f"window {number} of {len(windows)} ({text}): {seconds:.0f} s", err=True)
    return rows


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over windows: base cross-entropy, and `[kl, cross-entropy]` by attention count and delta."""
    out: dict[str, Any] = {"windows": len(rows), "base_ce": mean(row["base_ce"] for row in rows)}
    for count in ATTENTION_BLOCKS:
        out[str(count)] = {
            name: {
                "kl": mean(r[f"{name}.{count}"][0] for r in rows),
                "ce": mean(r[f"{name}.{count}"][1] for r in rows),
            }
            for name in ("bf16", "int8")
        }
    return out


def claims_of(figures: dict[str, Any], revision: str) -> list[dict[str, Any]]:
    """The distance between the deltas in KL and cross-entropy, whichever is larger, as an absolute value."""
    claims = []
    for count in ATTENTION_BLOCKS:
        packed, trained = figures[str(count)]["int8"], figures[str(count)]["bf16"]
        worst = max(abs(packed[key] - trained[key]) for key in ("kl", "ce"))
        layout = "ssm" if count == 0 else f"attention{count}"
        claims.append(
            {
                "id": f"model.{revision}.kl_text.{layout}.int8_minus_bf16",
                "value": round(worst, 5),
                "goal": f"<= {GOAL}",
            }
        )
    return claims


def main(
    delta: Annotated[Path, typer.Option("--delta", help="The delta as trained, before packing.")],
    model: Annotated[str, typer.Option("--model", help="Name or folder.")] = "smollm2-135m@r1",
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="A .jsonl.gz or .txt.gz file; repeatable.")
    ] = None,
    windows: Annotated[int, typer.Option("--windows", help="Per file.")] = 1,
    length: Annotated[int, typer.Option("--length", help="Tokens per window.")] = 2048,
    seed: Annotated[int, typer.Option("--seed", help="For the places of the attention blocks.")] = 0,
    results: Annotated[Path, typer.Option("--results", help="Folder for the JSON file.")] = RESULTS,
) -> None:
    """Compare the packed delta of a model with the delta as trained."""
    folder = resolve_model(model)
    source, tokenizer = open_model(folder), load_tokenizer(folder)
    trained = TrainedDelta(source, read_first_delta(delta))
    models = {
        "bf16": MorphModel.from_source(trained, source.config),
        "int8": MorphModel.from_source(source, source.config),
    }
    separator = 0  # <|endoftext|>
    files = text or [SPEECHES]
    cut = [
        (f"{path.parent.name}/{path.name}", window)
        for path in files
        for window in windows_of(path, tokenizer, windows, length, separator)
    ]
    rows = measure(models, cut, seed)
    figures = summarise(rows)
    by_text = {
        name: summarise([r for r in rows if r["text"] == name]) for name in dict.fromkeys(n for n, _ in cut)
    }
    revision = str(source.meta.get("revision"))
    content = {
        **header(),
        "length": length,
        "dtype": "float32",
        "figures": figures,
        "by_text": by_text,
        "claims": claims_of(figures, revision),
    }
    table = Table(
        "attention blocks", "KL bf16", "KL int8", "CE bf16", "CE int8", title=f"base CE {figures['base_ce']}"
    )
    for count in ATTENTION_BLOCKS:
        one, two = figures[str(count)]["bf16"], figures[str(count)]["int8"]
        table.add_row(str(count), *(f"{x:.4f}" for x in (one["kl"], two["kl"], one["ce"], two["ce"])))
    Console().print(table)
    Console().print(f"written to {write_results(results, 'delta_check', content)}")


if __name__ == "__main__":
    typer.run(main)
