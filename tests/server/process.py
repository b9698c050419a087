"""`python -m tests.server.process PORT DELAY DRAIN`: the server process with a scripted engine."""

from __future__ import annotations

import sys

from morph.server.serve import serve
from tests.server.fake import FakeEngine


def load() -> FakeEngine:
    print("loading", flush=True)
    return FakeEngine(delay=float(sys.argv[2]))


serve(load, port=int(sys.argv[1]), drain_s=float(sys.argv[3]), on_ready=lambda url, name: print(url, flush=True))
print("stopped in order", flush=True)
