"""Where Morph keeps what it downloads and compiles."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_home() -> Path:
    """The cache folder, absolute: `MORPH_HOME`, or the platform's own place. It need not exist yet."""
    override = os.environ.get("MORPH_HOME")
    return Path(override).expanduser().absolute() if override else Path(platformdirs.user_cache_dir("morph"))


def models_home() -> Path:
    """Folder of pulled models, one `name@revision` each."""
    return cache_home() / "models"
