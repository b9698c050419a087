"""Activation buffers that are kept between calls.

Large CPU allocations go back to the system when they are freed, and every new one pays a page fault per 4 KB; a
buffer per name that only grows avoids that and bounds the memory by the largest cohort.
"""

from __future__ import annotations

import torch


class Workspace:
    """Named buffers. A buffer's contents live until the same name is taken again."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._device = device
        self._dtype = dtype
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """An uninitialised contiguous `[rows, columns]`."""
        size = rows * columns
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype, device=self._device)
        return buffer[:size].view(rows, columns)
