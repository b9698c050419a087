"""`morph distill`: train the SSM mixers of a converted model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from morph.cli.options import parse_size

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def distill(
    model: Annotated[str, typer.Argument(metavar="DIR", help="A model made by morph convert, or a name.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="SOURCE[@WEIGHT]",
            help="Text, .jsonl, .npz or .npy files, folders of them, hf:NAME[:SPLIT[:FIELD]], recall[:TOKENS]; "
            "may be given several times.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the run; default: DIR-run here.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file over the defaults.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting, e.g. distill.lr=3e-4.")
    ] = None,
    stage: Annotated[Literal["all", "align", "distill"], typer.Option("--stage", help="Stages to run.")] = "all",
    max_seconds: Annotated[
        float | None,
        typer.Option("--max-seconds", min=1.0, help="Stop cleanly in time; the same command goes on."),
    ] = None,
    init: Annotated[
        Path | None, typer.Option("--init", help="Begin with these mixers: a .safetensors file or a model folder.")
    ] = None,
    teacher: Annotated[str | None, typer.Option("--teacher", help="Base to learn from; default: DIR's own.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N or auto.")] = "auto",
    export: Annotated[
        Literal["int8", "bfloat16"], typer.Option("--export", help="Type of the exported mixers.")
    ] = "int8",
    revision: Annotated[str, typer.Option("--revision", help="Name of the exported model's revision.")] = "trained",
    prepare: Annotated[
        Path | None, typer.Option("--prepare", help="Only tokenise the data into shards in this folder.")
    ] = None,
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="Token ids per shard, e.g. 16MB.")
    ] = "16MB",
    show_config: Annotated[bool, typer.Option("--show-config", help="Print the settings and stop.")] = False,
) -> None:
    """Train the SSM mixers: alignment with the attention, then distillation under sampled layouts.

    A run goes on from its last checkpoint when the command is given again. With torchrun it uses several devices.

    [bold]Example[/bold]: morph distill my-model --data texts/ --data recall@0.2 --out run
    """
    import json

    from morph.hub import resolve_model
    from morph.train.config import load_config
    from morph.train.prepare import prepare as write_shards
    from morph.train.run import Options, run_distill
    from morph.train.snapshot import STAGES

    settings = load_config(config, changes or ())
    if show_config:
        typer.echo(json.dumps(settings.to_dict(), indent=1))
        return
    folder = resolve_model(model)
    if prepare is not None:
        write_shards(folder, data or (), prepare, parse_size(shard_size), settings.run.seed, typer.echo)
        return
    outcome = run_distill(
        Options(
            model=folder,
            data=tuple(data or ()),
            out=out or Path(f"{folder.resolve().name}-run"),
            config=settings,
            stages=STAGES if stage == "all" else (stage,),
            max_seconds=max_seconds,
            init=init,
            teacher=resolve_model(teacher) if teacher else None,
            device=device,
            export=export,
            revision=revision,
        ),
        typer.echo,
    )
    if outcome.finished:
        typer.echo(outcome.model)


if __name__ == "__main__":
    import sys

    # torchrun starts modules, not commands.
    from morph.cli.app import main

    sys.exit(main(["distill", *sys.argv[1:]]))
