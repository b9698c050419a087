"""Sends the prompts at the same time and follows their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from morph.cli.display import is_plain
from morph.demo.prompts import Prompt
from morph.demo.view import live_view, plain_progress, summary
from morph.engine.params import RequestOutput, SamplingParams
from morph.errors import MorphError
from morph.server.interface import ServedEngine
from morph.server.prompts import chat_prompt


@dataclass
class Track:
    """One prompt on its way.

    Attributes:
        output: the latest, None while the engine has said nothing yet.
        begin: when it was sent, seconds of `time.perf_counter`.
        prompt_tokens: length of its prompt.
    """

    prompt: Prompt
    output: RequestOutput | None = None
    begin: float = 0.0
    prompt_tokens: int = 0

    @property
    def finished(self) -> bool:
        """True once the answer is complete."""
        return self.output is not None and self.output.finished


async def follow(
    engine: ServedEngine, track: Track, params: SamplingParams, number: int, changed: Callable[[Track], None]
) -> None:
    """Run one prompt to its end.

    Raises:
        InvalidRequest: e.g. the model has no gates.
        MorphError: the engine gave up on it.
    """
    ids = chat_prompt(engine.tokenizer, list(track.prompt.messages))
    track.prompt_tokens = len(ids)
    track.begin = time.perf_counter()
    request_id = f"demo-{number}"
    try:
        async for output in engine.generate(ids, params, request_id=request_id):
            track.output = output
            changed(track)
    finally:
        if not track.finished:
            engine.abort(request_id)
    if track.output is None or track.output.finish_reason in ("error", "abort"):
        reason = track.output.error if track.output is not None else "no answer"
        raise MorphError(f"the {track.prompt.kind} prompt could not be finished: {reason}")


def run(
    engine: ServedEngine,
    prompts: Sequence[Prompt],
    layouts: Sequence[str],
    budget: float | None,
    console: Console,
    plain: bool | None = None,
) -> list[Track]:
    """Show the prompts being answered, then a table.

    Args:
        layouts: one per prompt, usually all `auto`.
        plain: lines instead of panels; None = when the console is no terminal.

    Raises:
        MorphError: a prompt could not be finished; the others are given up.
    """
    tracks = [Track(prompt) for prompt in prompts]
    plain = is_plain(console) if plain is None else plain
    blocks = engine.config.num_blocks

    async def all_of_them(changed: Callable[[Track], None]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number, (track, layout) in enumerate(zip(tracks, layouts, strict=True)):
                    params = SamplingParams(max_tokens=track.prompt.max_tokens, layout=layout, attention_budget=budget)
                    group.create_task(follow(engine, track, params, number, changed))
        except* MorphError as errors:
            raise errors.exceptions[0] from None

    begin = time.perf_counter()
    if plain:
        asyncio.run(all_of_them(plain_progress(console, tracks, blocks)))
    else:
        with live_view(console, tracks, blocks):
            asyncio.run(all_of_them(lambda track: None))
    console.print(summary(tracks, blocks, time.perf_counter() - begin, plain))
    return tracks
