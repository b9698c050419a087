"""Request bodies as pydantic models: what is accepted, what is refused, and how it becomes `SamplingParams`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from morph.engine.grammar import Grammar
from morph.engine.params import MAX_LOGPROBS, SamplingParams
from morph.server.errors import bad_request

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1000
MAX_IDS = 4096


class Strict(BaseModel):
    """No coercion (`"5"` is not a number) and no unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class MorphOptions(Strict):
    """Morph's own options, the `morph` object of a request; the values are checked by `SamplingParams`."""

    layout: str | None = None
    attention_budget: float | None = None
    cache_affinity: float | Literal["auto"] | None = None
    gate_tokens: int | None = None
    regex: str | None = None
    grammar: str | None = None


class JsonSchema(BaseModel):
    """OpenAI's `response_format.json_schema`; `strict` is always on here."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Strict):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationBody(Strict):
    """What chat and text completions have in common."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=MAX_IDS)
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_IDS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    morph: MorphOptions | None = None

    renamed: ClassVar[dict[str, str]] = {
        "layout": "morph.layout",
        "attention_budget": "morph.attention_budget",
        "cache_affinity": "morph.cache_affinity",
        "gate_tokens": "morph.gate_tokens",
        "prompt_logprobs": "logprobs",
    }
    """Engine parameter -> field of this body."""

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        # Every token is searched for every stop string: a long list would slow all requests.
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > MAX_STOPS:
            raise ValueError(f"{len(strings)} strings; use at most {MAX_STOPS}")
        if any(len(text) > MAX_STOP_CHARS for text in strings):
            raise ValueError(f"a string is longer than {MAX_STOP_CHARS} characters; use shorter ones")
        return stop

    @model_validator(mode="after")
    def _check_combinations(self) -> GenerationBody:
        if self.best_of not in (None, self.choices):
            raise bad_request(
                f"best_of is {self.best_of} and n is {self.choices}; ranking is not supported, leave best_of out",
                "best_of",
                "unsupported_parameter",
            )
        wanted = self.response_format
        if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
            raise bad_request(
                f"response_format is of type {wanted.type!r} "
                f"{'without' if wanted.json_schema is None else 'with'} json_schema; the two go together",
                "response_format",
            )
        if len(self._grammars()) > 1:
            raise bad_request(
                "give one of response_format, morph.regex and morph.grammar; an answer matches one of them",
                "response_format",
            )
        if self.stream_options is not None and not self.stream:
            raise bad_request('stream_options is given without stream; add "stream": true', "stream_options")
        return self

    def _grammars(self) -> list[Grammar]:
        found = []
        if self.response_format is not None and self.response_format.type != "text":
            wanted = self.response_format.json_schema
            found.append(Grammar.json_schema({"type": "object"} if wanted is None else wanted.schema_))
        if self.morph is not None and self.morph.regex is not None:
            found.append(Grammar("regex", self.morph.regex, "morph.regex"))
        if self.morph is not None and self.morph.grammar is not None:
            found.append(Grammar("lark", self.morph.grammar, "morph.grammar"))
        return found

    @property
    def choices(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """True when the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, choice: int, **fixed: Any) -> SamplingParams:
        """Parameters of one of the `n` answers.

        Args:
            choice: its index; a given seed is advanced by it, so that the answers differ and stay reproducible.
            fixed: parameters that the endpoint decides.

        Raises:
            InvalidRequest: a value outside its range.
        """
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": tuple(self.stop_token_ids) if self.stop_token_ids else None,
            "ignore_eos": self.ignore_eos,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": _token_keys(self.logit_bias),
            **(self.morph.model_dump(exclude={"regex", "grammar"}) if self.morph else {}),
            "grammar": next(iter(self._grammars()), None),
        }
        if self.seed is not None and choice:
            given["seed"] = (self.seed + choice) % 2**64
        # OpenAI's default temperature is 1, the library's is 0.
        values = {"temperature": 1.0, **{key: value for key, value in given.items() if value is not None}}
        return SamplingParams(**values, **fixed)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    renamed: ClassVar[dict[str, str]] = {
        **GenerationBody.renamed,
        "prompt": "messages",
        "logprobs": "top_logprobs",
    }

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise bad_request(
                f"max_tokens is {both[0]} and max_completion_tokens is {both[1]}; give one",
                "max_completion_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request('top_logprobs is given without logprobs; add "logprobs": true', "top_logprobs")
        return self

    @property
    def limit(self) -> int | None:
        """Most answer tokens; None = up to the end of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def names(self) -> dict[str, str]:
        """Engine parameter -> the field that the client used."""
        if self.max_completion_tokens is None:
            return self.renamed
        return {**self.renamed, "max_tokens": "max_completion_tokens"}


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One string or one list of token ids per prompt.

        Raises:
            ApiError: 400, not one of the four shapes.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if all(isinstance(item, str) for item in prompt):
                return prompt
            if _are_ids(prompt):
                return [prompt]
            if all(isinstance(item, list) and _are_ids(item) for item in prompt):
                return prompt
        elif isinstance(prompt, list):
            raise bad_request("prompt is an empty list; give at least one token or text", "prompt")
        raise bad_request(
            "prompt has the wrong type; use a string, a list of strings, a list of token ids or a list of such lists",
            "prompt",
        )


class TokenizeBody(Strict):
    """`POST /tokenize`: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


def _are_ids(items: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in items)


def _token_keys(bias: dict[str, float] | None) -> dict[int, float] | None:
    """JSON has string keys only; the engine wants token ids."""
    if bias is None:
        return None
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError as error:
        raise bad_request(f"logit_bias has a key that is not a token id ({error})", "logit_bias") from None
