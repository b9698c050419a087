"""What every result file says about the machine, the software and the command that made it."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

VERSION_SCRIPT = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""

OUTSIDE_PATH = re.compile(r"(?:(?<=[:=])|^)(?:/|\.\./)[^:=]*")

CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in GB, and the flags that matter to speed."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "flags": {flag: flag in flags for flag in CPU_FLAGS},
        "system": f"{platform.system()} {platform.machine()}",
    }


def installed(python: str, packages: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that an interpreter has, without importing them."""
    command = [python, "-c", VERSION_SCRIPT, *packages]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(answer))


def versions() -> dict[str, str]:
    """Versions in this environment; Morph's from its source when it runs from a checkout."""
    import morph

    found = installed(sys.executable, ("torch", "transformers"))
    return {"python": platform.python_version(), **found, "morph": morph.__version__}


def shorten_paths(word: str) -> str:
    """A word of a command line with paths outside the working folder shortened to their last part: where
    things lie on a machine is not part of a result."""
    if "://" in word:
        return word
    return OUTSIDE_PATH.sub(lambda match: Path(match[0]).name, word)


def header() -> dict[str, Any]:
    """The part of a result file that is the same for every benchmark."""
    command = [shorten_paths(word) for word in sys.orig_argv]
    return {
        "machine": machine(),
        "versions": versions(),
        "command": shlex.join(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_results(folder: Path, name: str, content: dict[str, Any]) -> Path:
    """Write `<folder>/<name>.json` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
