"""`morph convert`: make a Morph model of an attention model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


def parse_blocks(text: str) -> list[int]:
    """Block numbers of `0,1,5-8`; an empty text is none.

    Raises:
        typer.BadParameter: anything else.
    """
    blocks: list[int] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise typer.BadParameter(f"{part!r} is no block and no range; write e.g. 0,1,5-8")
        blocks += range(int(first), int(last if dash else first) + 1)
    return blocks


@app.command()
def convert(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="A Hugging Face folder, a .gguf file, or a name that Morph knows.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to make.")],
    window: Annotated[int, typer.Option("--window", help="Tokens of window attention inside the SSM: 0 or 64.")] = 64,
    state_heads: Annotated[
        Literal["q", "kv"], typer.Option("--state-heads", help="One state per q head, or per kv head: a smaller state.")
    ] = "q",
    gate_rank: Annotated[int, typer.Option("--gate-rank", min=1, help="Rank of the SSM's output gate.")] = 64,
    static_attention: Annotated[
        str, typer.Option("--static-attention", metavar="BLOCKS", help="Blocks that keep attention only, e.g. 0,1,5-8.")
    ] = "",
    static_ssm: Annotated[
        str, typer.Option("--static-ssm", metavar="BLOCKS", help="Blocks that give their attention up for good.")
    ] = "",
    name: Annotated[str | None, typer.Option("--name", help="Name of the model; default: the folder's.")] = None,
    licence: Annotated[str | None, typer.Option("--licence", help="Of the base, where its files do not say.")] = None,
) -> None:
    """Make a Morph model of a Llama-family or Qwen3 model: every block gets an SSM beside its attention.

    The SSM mixers start as copies of the attention; train them with `morph distill`.

    [bold]Example[/bold]: morph convert smollm2-135m --out my-model --window 64
    """
    from rich.console import Console

    from morph.config import SSMConfig
    from morph.convert.base import open_base
    from morph.convert.convert import convert as write
    from morph.convert.convert import converted_config
    from morph.convert.report import print_figures

    opened = open_base(base)
    ssm = SSMConfig(window=window, state_heads=state_heads, gate_rank=gate_rank)
    config = converted_config(opened.source.config, ssm, parse_blocks(static_attention), parse_blocks(static_ssm))
    write(opened, out, config, name, licence)
    print_figures(config, Console(highlight=False))
    typer.echo(out)
