"""A conversation in the terminal: turns, and the commands between them."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.markup import escape

from morph.cli.display import figures, is_plain, legend, printable
from morph.engine.params import RequestOutput, SamplingParams
from morph.errors import InvalidRequest, MorphError
from morph.layout import Layout
from morph.server.interface import ServedEngine, max_context
from morph.server.prompts import chat_prompt

HELP = """\
/budget [0…1]   attention budget of the next turns; without a number, show it
/layout [X]     auto, attention, ssm or one 0/1 per block; without X, show it
/reset          forget the conversation
/quit           leave (also Ctrl-D)"""


class ChatSession:
    """Messages and settings of one conversation.

    Args:
        params: of every turn; `/budget` and `/layout` change them.
        system: system message, kept through `/reset`.
    """

    def __init__(self, engine: ServedEngine, params: SamplingParams, system: str | None = None) -> None:
        self.engine = engine
        self.params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._system)
        self._check_layout(params.layout)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._system)

    def command(self, line: str) -> str | None:
        """Carry out a `/command` and return what to say; None = leave.

        Raises:
            InvalidRequest: unknown command or bad value.
        """
        name, _, value = line.partition(" ")
        value = value.strip()
        if name in ("/quit", "/exit"):
            return None
        if name == "/help":
            return HELP
        if name == "/reset":
            self.reset()
            return "the conversation is forgotten"
        if name == "/budget":
            if value:
                self.params = replace(self.params, attention_budget=_number(value))
            budget = self.params.attention_budget
            shown = self.engine.engine_config.attention_budget if budget is None else budget
            unused = "" if self.params.layout == "auto" else f"; not used while the layout is {self.params.layout}"
            return f"attention budget {shown:g}{unused}"
        if name == "/layout":
            if value:
                self._check_layout(value)
                self.params = replace(self.params, layout=value)
            return f"layout {self.params.layout}"
        raise InvalidRequest(f"no command {name!r}; use /budget, /layout, /reset, /help or /quit")

    def _check_layout(self, layout: str) -> None:
        if layout != "auto":
            Layout.parse(layout, self.engine.config.num_blocks)

    async def turn(self, text: str, write: Callable[[str], None]) -> RequestOutput:
        """One question and its answer; the conversation keeps them only when the answer was completed.

        Args:
            write: is given the answer's text as it comes.

        Raises:
            InvalidRequest: e.g. the conversation has outgrown the context.
            MorphError: the engine failed.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = chat_prompt(self.engine.tokenizer, asked)
        # Near the context's end the answer gets what is left of it.
        room = max(1, max_context(self.engine) - len(prompt))
        params = self.params
        if params.max_tokens is not None and params.max_tokens > room:
            params = replace(params, max_tokens=room)
        request_id = f"chat-{uuid.uuid4().hex}"
        output = None
        try:
            async for output in self.engine.generate(prompt, params, request_id=request_id):
                write(output.delta_text)
        finally:
            if output is None or not output.finished:
                self.engine.abort(request_id)
        assert output is not None
        if output.finish_reason in ("error", "abort"):
            raise MorphError(f"the engine could not finish the answer: {output.error or output.finish_reason}")
        self.messages = [*asked, {"role": "assistant", "content": output.text}]
        return output


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"attention_budget is {text!r}; use a number from 0 to 1", "attention_budget") from None


def run(session: ChatSession, interactive: bool) -> None:
    """Read turns until the input ends.

    Args:
        interactive: prompt for input, go on after errors and show figures on stdout. Otherwise figures go to stderr
            and the first error ends the run.

    Raises:
        MorphError: when not interactive.
    """
    answers = Console(highlight=False)
    notes = answers if interactive else Console(stderr=True, highlight=False)
    plain = is_plain(notes)
    if interactive:
        _greet(session, notes, plain)
    with asyncio.Runner() as runner:
        while (line := _read_line(answers, interactive)) is not None:
            if not line:
                continue
            try:
                if line.startswith("/"):
                    said = session.command(line)
                    if said is None:
                        return
                    notes.print(escape(said), style="dim")
                    continue
                output = runner.run(session.turn(line, lambda new: answers.out(printable(new), end="")))
            except KeyboardInterrupt:
                if not interactive:
                    raise
                notes.print("\n(interrupted; this turn is forgotten)", style="dim")
            except MorphError as error:
                if not interactive:
                    raise
                notes.print(
                    f"\n{escape(str(error))}\n/reset begins a new conversation, /help lists commands",
                    style="red",
                )
            else:
                answers.out("")
                notes.print(figures(output, plain))


def _greet(session: ChatSession, notes: Console, plain: bool) -> None:
    import readline  # noqa: F401 - gives input() line editing and history

    notes.print(f"[bold]{escape(session.engine.model_name)}[/bold]; /help lists commands")
    notes.print(legend(plain))


def _read_line(console: Console, interactive: bool) -> str | None:
    """The next line, None at the end of input."""
    if not interactive:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        return console.input("\n[bold]>[/bold] ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
