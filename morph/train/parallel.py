"""Data parallelism through torch.distributed, when torchrun launched the process; one process otherwise."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from morph.errors import InvalidRequest


@dataclass(frozen=True)
class Group:
    """The processes of a run.

    Attributes:
        rank, size: of this process and of all. device: what it computes on.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True for the one process that writes and prints."""
        return self.rank == 0

    def share(self, rows: int) -> tuple[int, int]:
        """First and last + 1 of this process's rows in a step's `rows`.

        Raises:
            InvalidRequest: fewer rows than processes.
        """
        if rows < self.size:
            raise InvalidRequest(
                f"a step has {rows} sequences for {self.size} processes; raise tokens_per_step or start fewer"
            )
        return rows * self.rank // self.size, rows * (self.rank + 1) // self.size

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, flag: bool) -> bool:
        """True everywhere when it is true in any process: all stop at the same step."""
        if self.size == 1:
            return flag
        value = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()


def join(device: str = "auto") -> Group:
    """The group of this process; starts torch.distributed under torchrun (NCCL on CUDA, gloo on CPU).

    Args:
        device: `cpu`, `cuda`, `cuda:N`, or `auto` = CUDA where there is one.

    Raises:
        InvalidRequest: CUDA asked for and not there.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidRequest(f"device {device!r}: torch sees no CUDA device; use --device cpu")
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if where == "cuda":
        where = f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"
    chosen = torch.device(where)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    return Group(rank, size, chosen)


def leave() -> None:
    """End torch.distributed where `join` started it."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
