"""Where Morph keeps what it downloads and compiles."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_home() -> Path:
    """The cache folder: `MORPH_HOME`, or the platform's own place."""
    override = os.environ.get("MORPH_HOME")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("morph"))
