"""`morph distill --prepare`: tokenise sources into shards, for a machine that has neither the texts nor the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from morph.checkpoint import open_model
from morph.convert.folder import explain_full_disk
from morph.errors import InvalidRequest
from morph.train.sources import read_sources
from morph.train.tokens import save_shards


def prepare(
    model: Path,
    data: Sequence[str],
    out: Path,
    shard_bytes: int,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Write one or more shards per source; shards of the same names in `out` are replaced.

    Args:
        shard_bytes: token ids per shard, before compression.

    Raises:
        InvalidRequest: no data. MorphError: the disk is full.
    """
    if not data:
        raise InvalidRequest("there is no data to prepare; name some with --data", "data")
    source = open_model(model)
    written: list[Path] = []
    names: set[str] = set()
    # One source after the other: the texts of all of them need not be in memory together.
    for tokens in (tokens for word in data for tokens, _ in read_sources([word], source.tokenizer_dir, seed)):
        if tokens.name in names:
            raise InvalidRequest(f"two data sources are named {tokens.name!r}; rename one file or folder")
        names.add(tokens.name)
        tokens.check(source.config.vocab_size, None)
        with explain_full_disk(out, tokens.tokens.nbytes):
            out.mkdir(parents=True, exist_ok=True)
            paths = save_shards(tokens, out, shard_bytes)
        for old in set(out.glob(f"{tokens.name}-[0-9][0-9][0-9][0-9][0-9].npz")) - set(paths):
            old.unlink()
        size = sum(path.stat().st_size for path in paths)
        say(
            f"{tokens.name}: {len(tokens.ends)} documents, {len(tokens) / 1e6:.2f}M tokens, {len(paths)} shards, "
            f"{size / 1e6:.1f} MB"
        )
        written += paths
    return written
