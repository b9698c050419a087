"""The shipped model, from the user's cache or freshly pulled."""

from __future__ import annotations

from pathlib import Path

import pytest

from morph.errors import ModelNotFound
from morph.hub import pull, resolve_model

MODEL = "smollm2-135m"


@pytest.fixture(scope="session")
def shipped_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the shipped model. Session fixtures run before `own_home` points MORPH_HOME elsewhere."""
    try:
        return resolve_model(MODEL)
    except ModelNotFound as missing:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MORPH_HOME", str(tmp_path_factory.mktemp("pulled")))
            try:
                return pull(MODEL, progress=False)
            except ModelNotFound as error:
                pytest.skip(f"{missing}; and it cannot be pulled here: {error}")
