"""A guard against one miscompiled kernel: fla's gated backward on Hopper with triton 3.4 up to, not including, 3.7.1.

There triton miscompiles `chunk_bwd_dqkwg` for 64-wide blocks, the width that fla picks at head_dim 64, and fla-core
refuses to run it at all. 32-wide blocks are compiled rightly: gradients then agree with a float32 torch
implementation to the rounding of bfloat16 (`morph.train.gradcheck` repeats that comparison on the device). The two
assignments below lift the refusal and make fla choose 32. They change this one module of fla, in this process.
"""

from __future__ import annotations

import re
from types import ModuleType

import torch

FIRST_BROKEN, FIRST_FIXED = (3, 4, 0), (3, 7, 1)


def needs_narrow_blocks(capability: tuple[int, int], triton_version: str) -> bool:
    """True for a Hopper GPU (compute capability 9.x) with a triton that miscompiles 64-wide blocks."""
    version = tuple(int(number) for number in re.findall(r"\d+", triton_version)[:3])
    return capability[0] == 9 and FIRST_BROKEN <= version < FIRST_FIXED


def narrow_blocks_where_needed(chunk_o: ModuleType, device: torch.device | None = None) -> bool:
    """Make fla use 32-wide blocks where 64-wide ones are miscompiled; returns whether it did.

    Args:
        chunk_o: the module `fla.ops.common.chunk_o`.
    """
    import triton

    if not needs_narrow_blocks(torch.cuda.get_device_capability(device), triton.__version__):
        return False
    chunk_o.TRITON_ABOVE_3_7_1 = True  # type: ignore[attr-defined]
    chunk_o.check_shared_mem = lambda *args, **kwargs: False  # type: ignore[attr-defined]
    return True
