"""Are the fast kernels right on this device? fla in bfloat16 against the float32 torch reference, with gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from morph.errors import UnsupportedModel
from morph.kernels.flash_window import flash_window, has_flash_window
from morph.kernels.gated_delta import chunk_gated_delta_rule, l2_normalise, reference
from morph.kernels.gated_delta.fla import has_fla
from morph.model.ssm.gated_delta_net import masked_window

NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")
TOLERANCE = 0.02
"""Relative error that passes; bfloat16 rounding gives about 0.006, the miscompiled kernel of Hopper far more."""


@dataclass(frozen=True)
class GradientCheck:
    """Relative errors (norm of the difference over norm) of the output and of the five gradients."""

    errors: dict[str, float]

    @property
    def passed(self) -> bool:
        """All within tolerance; a NaN fails."""
        return all(error <= TOLERANCE for error in self.errors.values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {error:.4f}" for name, error in self.errors.items())


def check_gradients(
    device: torch.device, heads: int = 9, head_dim: int = 64, tokens: int = 512, batch: int = 2, seed: int = 0
) -> GradientCheck:
    """Run both on the same bfloat16 inputs."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v, up = (torch.randn(batch, tokens, heads, head_dim, generator=rng) for _ in range(4))
    g = F.logsigmoid(torch.randn(batch, tokens, heads, generator=rng) + torch.linspace(1.0, 6.5, heads))
    beta = torch.rand(batch, tokens, heads, generator=rng)
    half = [t.to(device, torch.bfloat16) for t in (l2_normalise(q), l2_normalise(k), v)]
    inputs = [*half, g.to(device), beta.to(device)]
    up = up.to(device, torch.bfloat16)
    results = []
    for exact in (True, False):
        leaves = [t.detach().to(torch.float32 if exact else t.dtype, copy=True).requires_grad_() for t in inputs]
        first, second, third, decay, strength = leaves
        rule = reference.chunk_gated_delta_rule if exact else chunk_gated_delta_rule
        out = rule(first, second, third, decay, strength)[0]
        out.backward(up.to(out.dtype))
        results.append([out.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)])
    pairs = zip(NAMES, *results, strict=True)
    return GradientCheck({name: float((fast - want).norm() / want.norm()) for name, want, fast in pairs})


def check_window(device: torch.device, heads: int, kv_heads: int, head_dim: int, size: int = 64) -> GradientCheck:
    """FlashAttention's window in bfloat16 against masked float32 attention."""
    rng = torch.Generator().manual_seed(1)
    shapes = [(2, 320, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    q, k, v, up = (torch.randn(*shape, generator=rng).to(device, torch.bfloat16) for shape in shapes)
    results = []
    for exact in (True, False):
        leaves = [t.to(torch.float32 if exact else t.dtype, copy=True).requires_grad_() for t in (q, k, v)]
        if exact:
            q32, k32, v32 = (leaf.transpose(1, 2) for leaf in leaves)
            out = masked_window(q32, k32, v32, size)
        else:
            out = flash_window(leaves[0], leaves[1], leaves[2], size)
        out.backward(up.to(out.dtype))
        results.append([out.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)])
    names = ("window o", "dq", "dk", "dv")
    pairs = zip(names, *results, strict=True)
    return GradientCheck({name: float((fast - want).norm() / want.norm()) for name, want, fast in pairs})


def require_right_gradients(
    device: torch.device, heads: int, head_dim: int, kv_heads: int, dtype: torch.dtype, window: int = 0
) -> GradientCheck | None:
    """Run the checks of the fast kernels that would be used, None where there are none.

    Raises:
        UnsupportedModel: the kernels of this device and triton are wrong.
    """
    if window and has_flash_window(device, dtype):
        check = check_window(device, heads, kv_heads, head_dim, window)
        if not check.passed:
            raise UnsupportedModel(
                f"PyTorch's windowed FlashAttention is wrong on this device (relative errors: {check}; limit "
                f"{TOLERANCE}): train with --set run.dtype=float32, or with another version of torch"
            )
    if not has_fla(device):
        return None
    check = check_gradients(device, heads, head_dim)
    if not check.passed:
        raise UnsupportedModel(
            f"fla's gated delta rule is wrong on this device (relative errors: {check}; limit {TOLERANCE}): "
            "use triton >= 3.7.1, or uninstall fla-core to train with the slower torch kernels"
        )
    return check
