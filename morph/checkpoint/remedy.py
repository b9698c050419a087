"""What to do about a file that cannot be read, said the same way everywhere."""

from __future__ import annotations

FETCH_AGAIN = "copy or download it again (`morph pull --force NAME` for a model that Morph fetched)"
"""For files that may be anyone's."""


def pull_again(name: str) -> str:
    """For files of a model that has a name."""
    return f"fetch it again with `morph pull --force {name}`"
