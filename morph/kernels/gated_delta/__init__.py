"""Gated delta rule: the oracle, the recurrence, and the differentiable chunked form with its dispatch by device.

`chunk_gated_delta_rule` of this package is what training calls: fla-core's Triton kernels for CUDA tensors where they
can be imported, the torch reference everywhere else. The functions of `reference` never dispatch.
"""

from __future__ import annotations

import itertools

import torch

from morph.kernels.gated_delta import reference
from morph.kernels.gated_delta.batched import batched_chunk_rule
from morph.kernels.gated_delta.fla import MAX_HEAD_DIM, fla_chunk_rule, has_fla
from morph.kernels.gated_delta.reference import (
    causal_conv,
    l2_normalise,
    recurrent_gated_delta_rule,
    sequential_gated_delta_rule,
)

__all__ = [
    "causal_conv",
    "chunk_gated_delta_rule",
    "l2_normalise",
    "recurrent_gated_delta_rule",
    "sequential_gated_delta_rule",
]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence over chunks of tokens, differentiable; query scale 1.

    On CUDA with fla-core the matmuls run in the dtype of `q`, `k` and `v` (state and gates in float32) and float32
    inputs are therefore left to the reference, which is exact; without fla-core there is one warning. Without gradients
    batched matmuls do the same, with nothing to compile per shape (fla compiles one kernel for each number of rows).

    Args:
        q, k, v: `[batch, tokens, heads, head_dim]`, q and k L2-normalised.
        g: log decay `[batch, tokens, heads]`, <= 0. beta: write strength, same shape.
        initial_state: float32 `[sequences, heads, head_dim, head_dim]` (d_k, d_v) or None = zeros.
        output_final_state: return the state after the last token too.
        cu_seqlens: int64 `[sequences + 1]`, where sequences begin and end in a batch of one row, or None: then each
            row of the batch is a sequence.

    Returns:
        o `[batch, tokens, heads, head_dim]` (dtype of q with fla, else float32) and, when asked for, the final states
        float32 `[sequences, heads, head_dim, head_dim]`, else None.

    Raises:
        ValueError: `cu_seqlens` with a batch of more than one row, or that does not span the tokens.
    """
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"cu_seqlens wants a batch of 1 row, got {q.shape[0]}; concatenate the sequences")
    half = q.dtype in (torch.bfloat16, torch.float16)
    if q.is_cuda and half and cu_seqlens is None and not torch.is_grad_enabled():
        out, state = batched_chunk_rule(q, k, v, g, beta, initial_state)
        return out, state if output_final_state else None
    if q.is_cuda and half and q.shape[-1] <= MAX_HEAD_DIM and has_fla(q.device):
        return fla_chunk_rule(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens)
    if cu_seqlens is None:
        out, state = reference.chunk_gated_delta_rule(q, k, v, g, beta, initial_state)
        return out, state if output_final_state else None
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != q.shape[1]:
        raise ValueError(f"cu_seqlens spans {bounds[0]}…{bounds[-1]}, the row has {q.shape[1]} tokens")
    outs, states = [], []
    for index, (begin, end) in enumerate(itertools.pairwise(bounds)):
        initial = None if initial_state is None else initial_state[index : index + 1]
        part = slice(begin, end)
        out, state = reference.chunk_gated_delta_rule(
            q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], initial
        )
        outs.append(out)
        states.append(state)
    return torch.cat(outs, dim=1), torch.cat(states) if output_final_state else None
