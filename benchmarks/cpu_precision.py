"""How far prompts in block fixed point are from float32 arithmetic, beside transformers in bfloat16.

    python -m benchmarks.cpu_precision

All serve the same bfloat16 weights. The reference multiplies them in float32 (transformers). Against it: Morph in
bfloat16 with float32 products and with block fixed point (`MORPH_CPU_GEMM`), whose keys and values are bfloat16, and
transformers' own bfloat16. Every position of the parity prompts counts: KL of the next token, and how often the
likeliest token is another. Needs nothing but what Morph depends on; a few minutes on two cores, 3 GB of memory.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.base_parity import Prompt, base_file, read_llama, read_prompts
from benchmarks.claims import RESULTS
from benchmarks.report import header, write_results
from morph import LLM, SamplingParams
from morph.hub import resolve_model


class Sums:
    """Running means over positions of one system."""

    def __init__(self) -> None:
        self.kl = self.positions = self.differ = 0.0

    def add(self, reference: torch.Tensor, logits: torch.Tensor) -> None:
        """Logits float32 `[positions, vocab]` of both."""
        log_p, log_q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
        self.kl += float((log_p.exp() * (log_p - log_q)).sum())
        self.differ += float((reference.argmax(-1) != logits.argmax(-1)).sum())
        self.positions += len(reference)

    def figures(self) -> dict[str, float]:
        """Means per position."""
        return {
            "kl": float(f"{self.kl / self.positions:.4g}"),
            "top_token_differs": round(self.differ / self.positions, 5),
        }


def prompt_logits(llm: LLM, prompt: Prompt) -> torch.Tensor:
    """Logits at all positions of a prompt but the last, float32 `[n - 1, vocab]`, from the engine."""
    runner = llm.engine.runner
    whole, parts = runner.prompt_logits, []

    def keep(*arguments: Any) -> torch.Tensor:
        parts.append(whole(*arguments))
        return parts[-1]

    runner.prompt_logits = keep  # type: ignore[method-assign]
    try:
        llm.generate([prompt.tokens], SamplingParams(max_tokens=1, layout="attention", prompt_logprobs=0))
    finally:
        del runner.prompt_logits
    return torch.cat(parts)


def measure(model: Path, prompts: Sequence[Prompt], gemms: Sequence[str]) -> dict[str, dict[str, float]]:
    """Figures by system."""
    bfloat16 = read_llama(base_file(model)).to(torch.bfloat16)
    exact = copy.deepcopy(bfloat16).float()
    sums = {"transformers-bfloat16": Sums()} | {f"morph-{gemm}": Sums() for gemm in gemms}
    engines = {}
    for gemm in gemms:
        os.environ["MORPH_CPU_GEMM"] = gemm
        engines[gemm] = LLM(str(model), dtype="bfloat16")
    for prompt in prompts:
        ids = torch.tensor([prompt.tokens[:-1]])
        with torch.inference_mode():
            reference = exact(input_ids=ids, use_cache=False).logits[0]
            sums["transformers-bfloat16"].add(reference, bfloat16(input_ids=ids, use_cache=False).logits[0].float())
        for gemm, llm in engines.items():
            sums[f"morph-{gemm}"].add(reference, prompt_logits(llm, prompt))
    return {name: one.figures() for name, one in sums.items()}


def main(
    model: Annotated[str, typer.Option("--model", help="A pulled model with a GGUF base.")] = "smollm2-135m",
    gemm: Annotated[list[str] | None, typer.Option("--gemm", help="Values of MORPH_CPU_GEMM; repeatable.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first prompts.")] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the result file.")] = "cpu_precision",
    results: Annotated[Path, typer.Option("--results", help="Folder of result files.")] = RESULTS,
) -> None:
    """Compare and store the figures."""
    gemms = gemm or ["float32", "fixed"]
    folder = Path(resolve_model(model))
    llm = LLM(str(folder), dtype="bfloat16")
    prompts = read_prompts(llm.tokenizer)[:limit]
    del llm
    figures = measure(folder, prompts, gemms)
    table = Table(title="Distance from float32 arithmetic on the same bfloat16 weights")
    for column in ("system", "KL per position", "likeliest token differs"):
        table.add_column(column)
    for system, row in figures.items():
        table.add_row(system, f"{row['kl']:.3g}", f"{row['top_token_differs']:.2%}")
    Console(highlight=False).print(table)
    claims = []
    if "morph-fixed" in figures:
        ratio = figures["morph-fixed"]["kl"] / figures["transformers-bfloat16"]["kl"]
        claims.append({"id": "cpu.fixed_point.kl_vs_bfloat16", "value": round(ratio, 4), "goal": "<= 1.0"})
    positions = sum(len(prompt.tokens) - 1 for prompt in prompts)
    content = header() | {"prompts": len(prompts), "positions": positions, "figures": figures, "claims": claims}
    print(f"written to {write_results(results, name, content)}")


if __name__ == "__main__":
    typer.run(main)
