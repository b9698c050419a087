"""RMSNorm and causal grouped-query attention of Llama and Qwen3."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from morph.config import ModelConfig
from morph.model.rope import apply_rope

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32 `[tokens, head_dim / 2]`, or `[batch, tokens, head_dim / 2]` where rows differ."""


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32; the result has the weight's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[..., size]`."""
        x = x.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(self.weight.dtype)


class Attention(nn.Module):
    """Softmax attention with RoPE, grouped kv heads and optional QK-norm. Parameter names are Hugging Face's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.q_proj = nn.Linear(d, config.q_size, bias=False)
        self.k_proj = nn.Linear(d, config.kv_size, bias=False)
        self.v_proj = nn.Linear(d, config.kv_size, bias=False)
        self.o_proj = nn.Linear(config.q_size, d, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated q, k and plain v: `[batch, heads, tokens, head_dim]` each, from `x` `[batch, tokens, hidden]`."""
        head_dim = self.config.head_dim
        q = self.q_proj(x).unflatten(-1, (-1, head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, head_dim))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention and output projection, `[batch, tokens, hidden]`: causal, or of one query that sees every key."""
        # Repeated by hand: with enable_gqa some backends fall back to the quadratic-memory path.
        k, v = (t.repeat_interleave(self.config.group_size, dim=1) for t in (k, v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self.o_proj(heads.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Causal attention over `x` `[batch, tokens, hidden]`; padding on the right changes no token before it."""
        return self.attend(*self.project(x, rope))
