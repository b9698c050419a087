"""`morph serve`: the OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from morph.cli.options import (
    DEFAULTS,
    BudgetOption,
    DeviceOption,
    DtypeOption,
    MaxContextOption,
    MaxRequestsOption,
    MemoryOption,
    engine_config,
    parse_size,
)

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

READY = """\
{name} is served at {url}/v1 (health: {url}/health, metrics: {url}/metrics); end with Ctrl-C
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}], \
"morph": {{"attention_budget": 0.5}}}}'"""


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A name (NAME or NAME@REVISION), a model folder or a .gguf file."),
    ] = None,
    model_option: Annotated[str | None, typer.Option("--model", help="The same as MODEL.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 = all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 = any free one.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="Model name for clients; default: the model's.")] = None,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "cpu",
    max_requests: MaxRequestsOption = DEFAULTS.max_requests,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", min=1, help="Requests that may queue; more get status 429.")
    ] = DEFAULTS.max_waiting,
    memory: MemoryOption = None,
    max_context: MaxContextOption = None,
    budget: BudgetOption = None,
    max_body: Annotated[
        int | None,
        typer.Option("--max-body", parser=parse_size, metavar="SIZE", help="Largest request body; default: 8MiB."),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            envvar="MORPH_API_KEY_FILE",
            help="API keys, one a line; clients must send one. Keys in MORPH_API_KEY (comma-separated) count too.",
        ),
    ] = None,
    drain: Annotated[
        float, typer.Option("--drain", min=0, help="Seconds that running requests get to finish at SIGTERM.")
    ] = 60.0,
) -> None:
    """Serve a model over HTTP with the OpenAI API.

    [bold]Example[/bold]: morph serve smollm2-135m --port 8000 --attention-budget 0.5
    """
    given = [word for word in (model, model_option) if word is not None]
    if len(given) != 1:
        raise typer.BadParameter("give one model: morph serve MODEL", param_hint="MODEL")
    config = engine_config(dtype, memory, max_context, max_requests, budget, max_waiting)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    from morph.cli import loading
    from morph.server.body import MAX_BODY_BYTES
    from morph.server.keys import read_keys
    from morph.server.serve import serve as serve_http

    keys = read_keys(key_file, os.environ.get("MORPH_API_KEY"))
    serve_http(
        lambda: loading.load_engine(given[0], config, device),
        host=host,
        port=port,
        model_name=name,
        drain_s=drain,
        max_body_bytes=MAX_BODY_BYTES if max_body is None else max_body,
        api_keys=keys,
        on_ready=lambda url, shown: typer.echo(READY.format(name=shown, url=url)),
    )
