"""Examples out of the documentation, as they stand there."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"
"""Where the documentation's server listens."""


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its first line of code."""

    file: str
    line: int
    language: str
    code: str


def blocks(language: str) -> list[Block]:
    """All blocks of a language, of README.md and docs/."""
    found: list[Block] = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if match[1] == language:
                line = text.count("\n", 0, match.start(2)) + 1
                found.append(Block(str(path.relative_to(ROOT)), line, language, match[2]))
    return found


def commands(program: str) -> list[tuple[str, list[str]]]:
    """`file:line` of the block and the words of each shell command that begins with `program`."""
    found: list[tuple[str, list[str]]] = []
    for block in blocks("sh"):
        for command in re.sub(r"\\\n\s*", " ", block.code).splitlines():
            if command.split()[:1] == [program]:
                found.append((f"{block.file}:{block.line}", shlex.split(command, comments=True)))
    return found
