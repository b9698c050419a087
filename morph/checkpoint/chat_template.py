"""Chat templates, rendered as transformers renders them but without importing it."""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from morph.errors import InvalidRequest


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here only what is inside counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


class ChatTemplate:
    """One template, compiled once; rendering is thread-safe.

    Args:
        source: jinja text. It runs in jinja's sandbox.
        variables: what every rendering sees beside the messages, such as `bos_token`.

    Raises:
        InvalidRequest: the text is no template.
    """

    def __init__(self, source: str, variables: dict[str, Any] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text.

        Args:
            messages: `role`, `content` and what else the template knows; None values count as absent.
            tools: JSON schemas.
            variables: further switches of the template, e.g. `enable_thinking`.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        values = {**self._variables, **variables}
        values |= {"messages": plain, "tools": tools, "documents": None}
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(values)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}; change them or use plain completions",
                "messages",
            ) from error
