"""What the server needs of an engine; `morph.engine.async_engine.AsyncEngine` has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from morph.config import EngineConfig, ModelConfig
from morph.engine.params import RequestOutput, SamplingParams


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the server uses."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text."""
        ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of the token ids."""
        ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """The conversation as one string in the model's chat format (with `tokenize=False`)."""
        ...


class ServedEngine(Protocol):
    """One model that answers requests concurrently."""

    @property
    def model_name(self) -> str:
        """Name under which clients ask for the model."""
        ...

    @property
    def tokenizer(self) -> Any:
        """A `Tokenizer`."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        ...

    @property
    def engine_config(self) -> EngineConfig:
        """Limits and defaults."""
        ...

    @property
    def has_gates(self) -> bool:
        """True when `layout="auto"` can be served."""
        ...

    @property
    def alive(self) -> bool:
        """False once the engine loop has stopped."""
        ...

    @property
    def error(self) -> BaseException | str | None:
        """Why the engine loop stopped."""
        ...

    def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request, the last one finished; raises `InvalidRequest` before the first."""
        ...

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        deliver: Callable[[RequestOutput | Exception], None],
        *,
        whole: bool = False,
    ) -> None:
        """Queue a request; the running event loop calls `deliver` with each output, or with what ended them.

        With `whole` the finished output is the only one. Raises `InvalidRequest` at once. The last item is a finished
        output or an exception.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request; nothing happens when it has ended."""
        ...

    def stats(self) -> dict[str, Any]:
        """Gauges and counters as plain numbers."""
        ...


def max_context(engine: ServedEngine) -> int:
    """Longest prompt + answer in tokens."""
    limit = engine.engine_config.max_context
    return engine.config.max_context if limit is None else min(limit, engine.config.max_context)


def is_adaptive(engine: ServedEngine) -> bool:
    """True when the layout can depend on the prompt."""
    return engine.config.is_adaptive


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of the ids, special tokens included."""
    return tokenizer.decode(list(ids), skip_special_tokens=False)
