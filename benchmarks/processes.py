"""What a server's process tree holds and burns, read from `/proc` (Linux)."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


def _stat_fields(pid: int) -> list[str]:
    """Fields of `/proc/<pid>/stat` from the third (state) on: the second may hold spaces."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def process_tree(root: int) -> list[int]:
    """The process and all its living descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                children[int(_stat_fields(int(entry.name))[1])].append(int(entry.name))
            except OSError:
                continue  # it ended since the listing
    tree = [root]
    for pid in tree:
        tree += children[pid]
    return tree


def pss_bytes(pids: list[int]) -> int:
    """Summed proportional set size: private pages in full, shared pages divided among who maps them."""
    total = 0
    for pid in pids:
        try:
            rollup = (PROC / str(pid) / "smaps_rollup").read_text()
        except OSError:
            continue  # it ended since the listing
        total += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of the processes so far, user and system, of all their threads."""
    ticks = 0
    for pid in pids:
        try:
            fields = _stat_fields(pid)
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks * TICK_S


def busy_seconds() -> float:
    """CPU time that the machine has spent on anything, stolen time included, since it started."""
    fields = [int(field) for field in (PROC / "stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = fields
    return (user + nice + system + irq + softirq + steal) * TICK_S


class Watch:
    """Samples a process tree while a row is measured.

    Attributes:
        peak_bytes: largest summed PSS seen.
        server_cores: mean number of cores that the tree kept busy.
        client_cores: the same for this process, the load client.
        other_cores: the same for all other processes of the machine: noise in the figures.
    """

    def __init__(self, root: int, interval_s: float = 0.25) -> None:
        self._root = root
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-watch", daemon=True)
        self.peak_bytes = 0
        self.server_cores = self.client_cores = self.other_cores = 0.0

    def _sample(self) -> None:
        while True:
            began = time.perf_counter()
            self.peak_bytes = max(self.peak_bytes, pss_bytes(process_tree(self._root)))
            # The kernel walks every page of the tree for one sample: where that takes long, sample
            # less often, so that watching never costs more than 5 % of a core.
            pause_s = max(self._interval_s, 20 * (time.perf_counter() - began))
            if self._stop.wait(pause_s):
                return

    def _times(self) -> tuple[float, float, float, float]:
        uptime = float((PROC / "uptime").read_text().split()[0])
        own = cpu_seconds([os.getpid()])
        return uptime, cpu_seconds(process_tree(self._root)), own, busy_seconds()

    def __enter__(self) -> Watch:
        self._began = self._times()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        wall, server, client, busy = (end - start for end, start in zip(self._times(), self._began, strict=True))
        self.server_cores = server / wall
        self.client_cores = client / wall
        self.other_cores = max(0.0, (busy - server - client) / wall)
