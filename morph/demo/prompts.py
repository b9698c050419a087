"""The prompts of the demo; see `data/SOURCES.md` for where the texts come from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

PAIRS = 40
"""Entries of the look-up table."""

ARITHMETIC = (
    "Betty is saving money for a new wallet which costs $100. Betty has only half of the money she needs. Her parents "
    "decided to give her $15 for that purpose, and her grandparents twice as much as her parents. How much more money "
    "does Betty need to buy the wallet?"
)
"""GSM8K (MIT)."""


@dataclass(frozen=True)
class Prompt:
    """One request of the demo.

    Attributes:
        kind: a word for the panel's title.
        messages: the conversation, ending with the user.
        max_tokens: longest answer.
    """

    kind: str
    messages: tuple[dict[str, str], ...]
    max_tokens: int


def prompts() -> list[Prompt]:
    """Eight prompts, from one line to a speech of about 2,300 tokens."""
    return [
        _ask("question", "What is the capital of France?", 32),
        _ask("arithmetic", f"{ARITHMETIC} Think step by step.", 128),
        _ask(
            "recall",
            f"{_text('urgent_needs_1961.txt')}\n\nAccording to the speech above, how many additional million dollars "
            "would accelerate development of the Rover nuclear rocket?",
            40,
        ),
        _ask("summary", f"Summarize this speech in two sentences.\n\n{_text('inaugural_1865.txt')}", 96),
        _ask(
            "code",
            "Write a Python function that checks whether a string is a palindrome. Show the code only.",
            128,
        ),
        Prompt(
            "chat",
            (
                {"role": "user", "content": "Hi! I have a free weekend and I like walking."},
                {"role": "assistant", "content": "Lovely! Do you prefer mountains, forests or the sea?"},
                {"role": "user", "content": "The sea. What should I pack for two days?"},
            ),
            96,
        ),
        _ask("look-up", _look_up(), 32),
        _ask("rewrite", "Make this polite: Send me the report now, I have waited long enough.", 48),
    ]


def _ask(kind: str, question: str, max_tokens: int) -> Prompt:
    return Prompt(kind, ({"role": "user", "content": question},), max_tokens)


def _text(name: str) -> str:
    return resources.files("morph.demo").joinpath("data", name).read_text(encoding="utf-8").strip()


def _look_up() -> str:
    """A table of made-up keys and values, and a question about one in its middle."""
    pairs = []
    for number in range(PAIRS):
        digest = hashlib.sha256(f"pair {number}".encode()).hexdigest()
        pairs.append((digest[:6], digest[6:14]))
    table = ",\n".join(f'  "{key}": "{value}"' for key, value in pairs)
    key, _ = pairs[PAIRS // 2]
    return f'Here is a JSON object.\n{{\n{table}\n}}\nWhat is the value of the key "{key}"? Answer with the value only.'
