"""One block: norm, mixer, residual, norm, MLP, residual; the mixer is chosen per row of the batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from morph.config import BlockKind, ModelConfig
from morph.errors import InvalidRequest
from morph.model.attention import Attention, RMSNorm, Rope
from morph.model.ssm import make_ssm


class MLP(nn.Module):
    """SwiGLU. Parameter names are Hugging Face's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[..., hidden]`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Both mixers of an adaptive block in parallel, or the one mixer of a static block."""

    def __init__(self, config: ModelConfig, kind: BlockKind) -> None:
        super().__init__()
        self.kind = kind
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config) if kind != "ssm" else None
        self.ssm = make_ssm(config) if kind != "attention" else None
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def mix(self, x: torch.Tensor, attention: list[bool], rope: Rope) -> torch.Tensor:
        """Mixer output of normed inputs `[batch, tokens, hidden]`; `attention` holds one choice per row.

        No row computes the path that it does not take.
        """
        if self.kind != "adaptive":
            fixed = self.kind == "attention"
            if any(bit != fixed for bit in attention):
                raise InvalidRequest(
                    f"a layout asks a static {self.kind} block for the other mixer", "layout"
                )
        if all(attention):
            assert self.attention is not None
            return self.attention(x, rope)
        if not any(attention):
            assert self.ssm is not None
            return self.ssm(x, rope)
        assert self.attention is not None and self.ssm is not None
        yes = [row for row, bit in enumerate(attention) if bit]
        no = [row for row, bit in enumerate(attention) if not bit]
        mixed = torch.cat([self.attention(x[yes], rope), self.ssm(x[no], rope)])
        back = torch.empty(len(attention), dtype=torch.long)
        back[yes + no] = torch.arange(len(attention))
        return mixed[back.to(x.device)]

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Residual, MLP, residual. The stream `hidden` is float32 whatever the weights' dtype."""
        hidden = hidden + mixed.float()
        return hidden + self.mlp(self.post_norm(hidden)).float()
