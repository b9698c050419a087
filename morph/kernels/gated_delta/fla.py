"""fla-core's Triton kernels of the gated delta rule, where they can be imported (extra `train`)."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from morph.kernels.gated_delta.hopper import narrow_blocks_where_needed

log = logging.getLogger(__name__)

MAX_HEAD_DIM = 256
"""Largest key dimension of fla's chunk kernels."""


@functools.cache
def fla_rule() -> Callable[..., Any] | None:
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule`, patched where needed, or None after one warning.

    Call it only where there is a CUDA device: fla looks at the device when it is imported.
    """
    try:
        rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        chunk_o = importlib.import_module("fla.ops.common.chunk_o")
    except ImportError as error:
        log.warning(
            "fla-core cannot be imported (%s): the gated delta rule runs in plain torch, several times slower on "
            "this GPU; install it with `pip install 'morph-hybrid[train]'`",
            error,
        )
        return None
    if narrow_blocks_where_needed(chunk_o):
        log.info("32-wide blocks in fla's backward: this triton miscompiles 64-wide ones on Hopper")
    return rule  # type: ignore[no-any-return]


def has_fla(device: torch.device) -> bool:
    """True when the fast kernels would run on this device."""
    return device.type == "cuda" and fla_rule() is not None


def fla_chunk_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Shapes as in `morph.kernels.gated_delta.chunk_gated_delta_rule`; matmuls in the dtype of q, o in it too."""
    rule = fla_rule()
    assert rule is not None, "fla_chunk_rule is called only where fla is present"
    out, state = rule(
        q,
        k,
        v,
        g.float(),
        beta.float(),
        scale=1.0,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return out, state
