"""Serving on a CPU: Morph beside vLLM's CPU build and transformers, on the same requests in one run.

    python -m benchmarks.cpu_serving --peer morph --peer vllm --model MODEL \\
        --hf-model HF_FOLDER --vllm-venv VENV --name cpu_serving

Prompts are token ids of real text, distinct and without a shared prefix; every answer has exactly the asked
number of tokens. Targets run one at a time (start, all rows, stop), `--rounds` times in turn. Peers are set up
with `benchmarks/peers/setup_vllm_cpu.sh`; any other OpenAI-compatible server joins with `--target name=url`.
"""

from __future__ import annotations

import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from benchmarks.claims import RESULTS, Claim, claims_table
from benchmarks.report import header, installed, write_results
from benchmarks.servers import morph_server, vllm_server
from benchmarks.serving import Rows, figures_table, run_rounds
from benchmarks.targets import Target, own_server, running_server, transformers_generate
from benchmarks.workload import PromptSource, Workload, cut_prompts, load_tokenizer, read_documents

DATA = Path(__file__).parent / "data"
ROWS = ["512/64@8x16", "3500/64@8x8", "128/128@1x3"]
VLLM_PACKAGES = ("vllm", "torch", "transformers")


T = TypeVar("T")


class Peer(StrEnum):
    """What the benchmark can start itself."""

    MORPH = "morph"
    VLLM = "vllm"
    TRANSFORMERS = "transformers"


class MorphLayout(StrEnum):
    """Layout that all requests of a Morph target ask for; `auto` with an attention budget of 0.5."""

    ATTENTION = "attention"
    AUTO = "auto"
    SSM = "ssm"


class Dtype(StrEnum):
    """Type of weights and KV cache."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


LAYOUTS = [MorphLayout.ATTENTION, MorphLayout.AUTO]
VLLM_DTYPES = list(Dtype)


def make_claims(rows: Rows) -> list[Claim]:
    """Claims that these rows, keyed by target and workload, support.

    Morph is all-attention where it is held against vLLM: both then serve the same model. vLLM counts with the
    better of its dtypes, row by row, whichever Morph uses.
    """

    def figure(target: str, workload: str, key: str) -> float | None:
        return rows.get((target, workload), {}).get(key)

    def vllm(workload: str, key: str) -> list[float]:
        values = [figure(name, row, key) for name, row in rows if name.startswith("vllm") and row == workload]
        return [value for value in values if value is not None]

    claims = []
    for workload in ("512x64", "3500x64"):
        own, peers = (
            figure("morph-attention", workload, "total_tokens_per_s"),
            vllm(workload, "total_tokens_per_s"),
        )
        if own is not None and peers:
            claims.append(Claim(f"cpu.throughput.{workload}.vs_vllm", own / max(peers), ">= 2.0"))
    own, peers = figure("morph-attention", "128x128", "tpot_p50_s"), vllm("128x128", "tpot_p50_s")
    if own is not None and peers:
        claims.append(Claim("cpu.tpot.128x128.vs_vllm", own / min(peers), "<= 0.6"))
    auto = figure("morph-auto", "3500x64", "total_tokens_per_s")
    attention = figure("morph-attention", "3500x64", "total_tokens_per_s")
    if auto is not None and attention is not None:
        claims.append(Claim("cpu.auto_vs_attention.3500x64", auto / attention, ">= 1.0"))
    memory = figure("morph-attention", "3500x64", "peak_memory_gb")
    if memory is not None:
        claims.append(Claim("cpu.memory.3500x64.gb", memory, "<= 2.0"))
    return claims


def parse_target(text: str) -> Target:
    """A target written as `name=url`."""
    name, sign, url = text.partition("=")
    if not (name and sign and "://" in url):
        raise typer.BadParameter(f"{text!r}: write name=url, as in other=http://127.0.0.1:8000")
    return running_server(name, url.rstrip("/").removesuffix("/v1"))


def need(value: T | None, option: str, user: str) -> T:
    """The value of an option that a peer cannot do without."""
    if value is None:
        raise typer.BadParameter(f"{user} needs it", param_hint=option)
    return value


def main(
    peer: Annotated[list[Peer] | None, typer.Option("--peer", help="Start this one; repeatable.")] = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", help="A running server, name=url; repeatable.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="What Morph serves: a name, a folder or a .gguf file.")
    ] = None,
    hf_model: Annotated[
        Path | None,
        typer.Option("--hf-model", help="The base as a Hugging Face folder: for the peers."),
    ] = None,
    morph_layout: Annotated[
        list[MorphLayout],
        typer.Option("--morph-layout", help="Layouts that Morph serves; repeatable."),
    ] = LAYOUTS,
    morph_args: Annotated[str, typer.Option("--morph-args", help="More options of `morph serve`.")] = "",
    vllm_venv: Annotated[
        Path | None,
        typer.Option("--vllm-venv", envvar="VLLM_VENV", help="Where vLLM is installed."),
    ] = None,
    vllm_dtype: Annotated[
        list[Dtype], typer.Option("--vllm-dtype", help="Dtypes that vLLM serves; repeatable.")
    ] = VLLM_DTYPES,
    tcmalloc: Annotated[
        Path | None,
        typer.Option("--tcmalloc", help="libtcmalloc_minimal.so.4 for vLLM, as it recommends."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Dtype of Morph and of transformers.")] = Dtype.BFLOAT16,
    text: Annotated[Path, typer.Option("--text", help="File or folder that prompts are cut from.")] = DATA,
    row: Annotated[list[str], typer.Option("--row", help="IN/OUT@CONCURRENCYxREQUESTS; repeatable.")] = ROWS,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns; the figures are their medians.")] = 1,
    name: Annotated[str, typer.Option("--name", help="Name of the result file.")] = "cpu_serving",
    results: Annotated[Path, typer.Option("--results", help="Folder of result files.")] = RESULTS,
) -> None:
    """Serve the same requests with every target, print the figures and store them."""
    console = Console(highlight=False)
    peers = list(dict.fromkeys(peer or []))
    targets = [parse_target(given) for given in target or []]
    if Peer.MORPH in peers:
        served = need(model, "--model", "--peer morph")
        spec = morph_server(sys.executable, served, dtype, shlex.split(morph_args))
        targets += [own_server(f"morph-{layout}", spec) for layout in morph_layout]
    if Peer.VLLM in peers:
        venv = need(vllm_venv, "--vllm-venv", "--peer vllm")
        folder = need(hf_model, "--hf-model", "--peer vllm")
        cores = sorted(os.sched_getaffinity(0))
        targets += [own_server(f"vllm-{kind}", vllm_server(venv, folder, kind, cores, tcmalloc)) for kind in vllm_dtype]
    if Peer.TRANSFORMERS in peers:
        folder = need(hf_model, "--hf-model", "--peer transformers")
        targets.append(transformers_generate(f"transformers-{dtype}", folder, dtype))
    if not targets:
        raise typer.BadParameter("name at least one --peer or --target")

    tokenizer_model = model if model is not None or hf_model is None else str(hf_model)
    tokenizer = load_tokenizer(need(tokenizer_model, "--model", "the tokenizer"))
    source = PromptSource(read_documents(text), tokenizer)
    work = [(workload, cut_prompts(workload, source)) for workload in map(Workload.parse, row)]
    entries = run_rounds(targets, work, rounds, console.print)

    rows = {(entry["target"], entry["workload"]): entry["figures"] for entry in entries}
    claims = make_claims(rows)
    content = header()
    if Peer.VLLM in peers and vllm_venv is not None:
        content["versions"]["vllm"] = installed(str(vllm_venv / "bin" / "python"), VLLM_PACKAGES)
    content |= {
        "targets": {entry.name: entry.settings for entry in targets},
        "rounds": rounds,
        "rows": entries,
        "claims": [{"id": claim.id, "value": claim.value, "goal": claim.goal} for claim in claims],
    }
    path = write_results(results, name, content)
    console.print(figures_table("CPU serving", rows))
    if claims:
        console.print(claims_table([(path.name, claim) for claim in claims]))
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
