"""Sliding-window attention of whole sequences by the FlashAttention kernels that PyTorch carries for CUDA.

`scaled_dot_product_attention` has no window argument; the operator beneath it does, and has its derivative. The plain
torch form is `morph.model.ssm.gated_delta_net.window_attention`.
"""

from __future__ import annotations

import torch


def has_flash_window(device: torch.device, dtype: torch.dtype) -> bool:
    """True where `flash_window` runs: CUDA with compute capability 8.0 or more, half precision."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and torch.backends.cuda.is_flash_attention_available()
    )


def flash_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int) -> torch.Tensor:
    """Attention to the last `size` tokens, the current one included; differentiable.

    Args:
        q: `[batch, tokens, heads, head_dim]`, bfloat16 or float16 on CUDA. k, v: the same with the kv heads.

    Returns:
        `[batch, tokens, heads, head_dim]` in the dtype of `q`.
    """
    length = q.shape[1]
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, length, length, 0.0, False, False, window_size_left=size - 1, window_size_right=0
    )[0]
    return out
