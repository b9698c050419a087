"""The all-attention layout against transformers' LlamaForCausalLM on the same weights, in float32.

    python -m benchmarks.base_parity

20 prompts of many kinds, from one line to about 1,500 tokens, 64 greedy tokens each, through the engine with both of
its CPU backends. transformers reads the model's GGUF file with its own reader, so Morph's is under test too, and gets
the tokens that Morph chose: every step compares a whole row of logits after the same tokens. Needs nothing but what
Morph depends on; a few minutes on two cores, 2 GB of memory.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.claims import RESULTS
from benchmarks.report import header, write_results
from morph import LLM, SamplingParams
from morph.checkpoint import ChatTokenizer
from morph.engine.engine import Engine
from morph.engine.request import Request
from morph.engine.runner import Cohort
from morph.hub import resolve_model

DATA = Path(__file__).parent / "data"
SPEECH_TOKENS = (200, 500, 800, 1200, 1500)
"""Lengths of the prompts that are cut from speeches."""

BOUND = 1e-3
"""Largest difference between logits, and the margin below which the likeliest token may differ."""

BACKENDS = ("native", "torch")


@dataclass(frozen=True)
class Prompt:
    """One prompt: what it is and its token ids."""

    kind: str
    tokens: list[int]


@dataclass
class Row:
    """One prompt's comparison over all of its steps.

    Attributes:
        difference: largest absolute difference between two logits.
        differ: steps where the likeliest tokens differ although transformers' margin exceeds the bound.
        close: steps whose margin lies within the bound, where either token is right.
        margin: transformers' smallest margin.
    """

    kind: str
    prompt_tokens: int
    steps: int
    difference: float
    differ: int
    close: int
    margin: float


def read_prompts(tokenizer: ChatTokenizer) -> list[Prompt]:
    """The stored prompts, then cuts of speeches at a document's begin."""
    prompts = []
    for line in (DATA / "parity_prompts.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        text = entry["text"]
        if entry["chat"]:
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompts.append(Prompt(entry["kind"], tokenizer.encode(text, add_special_tokens=False)))
    with gzip.open(DATA / "us_presidential_speeches.txt.gz", "rt", encoding="utf-8") as file:
        speeches = [tokenizer.encode(text.strip()) for text in file.read().split("<|doc|>")]
    whole = [tokens for tokens in speeches if len(tokens) > max(SPEECH_TOKENS)]
    prompts += [Prompt("speech", tokens[:n]) for n, tokens in zip(SPEECH_TOKENS, whole, strict=False)]
    return prompts


def read_llama(gguf: Path) -> Any:
    """transformers' LlamaForCausalLM in float32 from a GGUF file, read by transformers alone.

    Its `from_pretrained` asks for one more package to do the same.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    parsed = load_gguf_checkpoint(str(gguf))["config"]
    config = LlamaConfig(**{key: value for key, value in parsed.items() if key != "_model_name_or_path"})
    model = LlamaForCausalLM(config).float().eval()
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    tensors = {name: torch.as_tensor(value) for name, value in tensors.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise RuntimeError(f"{gguf}: transformers misses {missing} and does not know {unexpected}")
    model.tie_weights()
    return model.requires_grad_(False)


@contextmanager
def recorded_logits(engine: Engine) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Every row of logits that the engine samples from, float32 `[vocab]`, by request id, in order."""
    runner = engine.runner
    rows: dict[str, list[torch.Tensor]] = {}
    finish_cohort, decode = runner.finish_cohort, runner.decode

    def keep(requests: Sequence[Request], logits: torch.Tensor) -> torch.Tensor:
        for request, row in zip(requests, logits, strict=True):
            rows.setdefault(request.id, []).append(row.clone())
        return logits

    def finish(cohort: Cohort) -> torch.Tensor:
        return keep(cohort.requests, finish_cohort(cohort))

    def step(requests: list[Request]) -> torch.Tensor:
        return keep(requests, decode(requests))

    runner.finish_cohort, runner.decode = finish, step  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del runner.finish_cohort, runner.decode


def compare(
    llm: LLM, llama: Any, prompts: Sequence[Prompt], max_tokens: int, layout: str = "attention"
) -> Iterator[Row]:
    """Run all prompts through the engine at once, then each through transformers with the engine's tokens."""
    params = SamplingParams(max_tokens=max_tokens, layout=layout, ignore_eos=True)
    with recorded_logits(llm.engine) as rows:
        outputs = llm.generate([prompt.tokens for prompt in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        ours = torch.stack(rows[output.request_id])
        ids = torch.tensor([prompt.tokens + output.token_ids[:-1]])
        with torch.inference_mode():
            theirs = llama(input_ids=ids, use_cache=False, logits_to_keep=len(output.token_ids)).logits[0]
        top, best = theirs.topk(2, dim=-1)
        margin = top[:, 0] - top[:, 1]
        wrong = best[:, 0] != torch.tensor(output.token_ids)
        yield Row(
            kind=prompt.kind,
            prompt_tokens=len(prompt.tokens),
            steps=len(output.token_ids),
            difference=float((ours - theirs).abs().max()),
            differ=int((wrong & (margin > BOUND)).sum()),
            close=int((margin <= BOUND).sum()),
            margin=float(margin.min()),
        )


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Force one of the engine's CPU backends."""
    before = os.environ.get("MORPH_KERNELS")
    os.environ["MORPH_KERNELS"] = name
    try:
        yield
    finally:
        os.environ.pop("MORPH_KERNELS")
        if before is not None:
            os.environ["MORPH_KERNELS"] = before


def base_file(folder: Path) -> Path:
    """The GGUF file of a pulled model's base.

    Raises:
        typer.BadParameter: the base is of another kind.
    """
    meta = json.loads((folder / "config.json").read_text())
    if meta.get("base", {}).get("kind") != "gguf":
        raise typer.BadParameter(f"{folder} has no GGUF base; give a pulled model")
    return folder / meta["base"]["file"]


def claims_of(name: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What one backend's rows say."""
    prefix = f"model.base_parity.{name}"
    return [
        {
            "id": f"{prefix}.max_logit_difference",
            "value": float(f"{max(row.difference for row in rows):.4g}"),
            "goal": f"<= {BOUND}",
        },
        {"id": f"{prefix}.tokens_differ_above_margin", "value": sum(row.differ for row in rows), "goal": "<= 0"},
        {"id": f"{prefix}.prompts", "value": len(rows), "goal": ">= 20"},
        {"id": f"{prefix}.steps", "value": sum(row.steps for row in rows), "goal": ">= 1280"},
    ]


def main(
    model: Annotated[str, typer.Option("--model", help="Name or folder of a pulled model.")] = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Per prompt.")] = 64,
    count: Annotated[int | None, typer.Option("--prompts", min=1, help="Only the first ones; default: all.")] = None,
    results: Annotated[Path, typer.Option("--results", help="Folder for the JSON file.")] = RESULTS,
) -> None:
    """Compare the all-attention layout with transformers."""
    folder = resolve_model(model)
    llama = read_llama(base_file(folder))
    table = Table(
        "backend", "prompt", "tokens", "max logit difference", "differ", "close calls", "least margin",
        title="All attention against transformers, float32",
    )  # fmt: skip
    figures: dict[str, Any] = {}
    claims: list[dict[str, Any]] = []
    for name in BACKENDS:
        begin = time.perf_counter()
        with backend(name):
            llm = LLM(folder, dtype="float32", max_requests=8, max_context=2048)
        used = llm.engine.runner.kernels.name
        if used != name:
            raise RuntimeError(f"the engine took the {used} kernels, not {name}")
        prompts = read_prompts(llm.tokenizer)[:count]
        rows = list(compare(llm, llama, prompts, max_tokens))
        del llm
        for row in rows:
            table.add_row(
                name, row.kind, str(row.prompt_tokens), f"{row.difference:.2e}", str(row.differ), str(row.close),
                f"{row.margin:.2e}",
            )  # fmt: skip
        figures[name] = {
            "close_calls": sum(row.close for row in rows),
            "seconds": round(time.perf_counter() - begin, 1),
            "rows": [asdict(row) for row in rows],
        }
        claims += claims_of(name, rows)
    Console().print(table)
    content = {**header(), "dtype": "float32", "margin": BOUND, "figures": figures, "claims": claims}
    Console().print(f"written to {write_results(results, 'base_parity', content)}")


if __name__ == "__main__":
    typer.run(main)
