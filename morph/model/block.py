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
                raise InvalidRequest(f"a layout asks a static {self.kind} block for the other mixer", "layout")
        yes = [row for row, bit in enumerate(attention) if bit]
        no = [row for row, bit in enumerate(attention) if not bit]
        if not (yes and no):
            return self._attend(x, rope) if yes else self._recur(x, rope)
        out = torch.empty_like(x)
        out[yes], out[no] = self._attend(x[yes], rope), self._recur(x[no], rope)
        return out

    def _attend(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        assert self.attention is not None, "block has no attention"
        out: torch.Tensor = self.attention(x, rope)
        return out

    def _recur(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        assert self.ssm is not None, "block has no ssm"
        out: torch.Tensor = self.ssm(x, rope)
        return out

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Residual, MLP, residual. The stream `hidden` is float32 whatever the weights' dtype."""
        hidden = hidden + mixed.float()
        return hidden + self.mlp(self.post_norm(hidden)).float()
