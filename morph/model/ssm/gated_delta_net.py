"""Gated DeltaNet mixer (Yang et al., 2024) as Morph converts attention into: identity-start conv, rank-r output gate,
no RoPE, optional attention window with a learned mix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from morph.config import ModelConfig
from morph.errors import UnsupportedModel
from morph.kernels.gated_delta.reference import chunk_gated_delta_rule
from morph.model.attention import Attention, Rope
from morph.model.rope import apply_rope

SILU_ONE = 1.278464542761074
"""silu of this is 1: the output gate starts open and neutral."""


@dataclass
class GatedDeltaNetState:
    """What one block keeps of a batch of sequences between tokens.

    Attributes:
        conv: `[batch, conv_width - 1, qkv]`, inputs of the conv, oldest first.
        recurrent: float32 `[batch, heads, head_dim, head_dim]`.
        keys, values: `[batch, kv_heads, <= window, head_dim]`, rotated keys and values of the last tokens.
    """

    conv: torch.Tensor
    recurrent: torch.Tensor
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


class DepthwiseConv(nn.Module):
    """Causal depthwise convolution without activation; the last tap meets the current token."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, width))
        nn.init.ones_(self.weight[:, -1])

    def forward(self, x: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        """`x` `[batch, tokens, channels]`; `before` `[batch, width - 1, channels]` are the tokens before, or zeros."""
        width, tokens = self.weight.shape[1], x.shape[1]
        padded = F.pad(x, (0, 0, width - 1, 0)) if before is None else torch.cat([before.to(x.dtype), x], dim=1)
        out = padded[:, :tokens] * self.weight[:, 0]
        for tap in range(1, width):
            out = torch.addcmul(out, padded[:, tap : tap + tokens], self.weight[:, tap])
        return out


class GatedDeltaNet(nn.Module):
    """The mixer of one block.

    Args:
        config: `config.ssm` says window, state heads, conv width and gate rank.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.ssm is None:
            raise UnsupportedModel("a Gated DeltaNet needs an ssm config")
        self.config, self.ssm = config, config.ssm
        d, heads = config.hidden_size, config.num_state_heads
        self.qkv = nn.Linear(d, config.qkv_size, bias=False)
        self.conv = DepthwiseConv(config.qkv_size, self.ssm.conv_width)
        self.ab = nn.Linear(d, 2 * heads)
        self.gain = nn.Parameter(torch.ones(config.num_heads))
        self.gate_down = nn.Linear(d, self.ssm.gate_rank, bias=False)
        self.gate_up = nn.Linear(self.ssm.gate_rank, config.q_size)
        self.out = nn.Linear(config.q_size, d, bias=False)
        if self.ssm.window:
            self.mix = nn.Parameter(torch.zeros(config.num_heads))
        self.reset_gates()

    @torch.no_grad()
    def reset_gates(self) -> None:
        """Decays of 2 to 460 tokens' half-life over the heads, write strength 1/2, open output gate."""
        heads = self.config.num_state_heads
        self.ab.weight.zero_()
        self.ab.bias.copy_(torch.cat([torch.linspace(1.0, 6.5, heads), torch.zeros(heads)]))
        self.gate_up.weight.zero_()
        self.gate_up.bias.fill_(SILU_ONE)

    @torch.no_grad()
    def init_from_attention(self, attention: Attention) -> None:
        """Start of a conversion: projections copied from the block's attention, everything else neutral."""
        self.qkv.weight.copy_(torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]))
        self.out.weight.copy_(attention.o_proj.weight)
        self.conv.weight.zero_()
        self.conv.weight[:, -1] = 1.0
        self.gain.fill_(1.0)
        self.reset_gates()
        if self.ssm.window:
            self.mix.zero_()

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Mixer output `[batch, tokens, hidden]` of whole sequences `x` `[batch, tokens, hidden]`."""
        projected = self.qkv(x)
        q, k, v, g, beta = self._recurrence_inputs(x, self.conv(projected))
        recurrent, _ = chunk_gated_delta_rule(q, k, v, g, beta)
        window = self._window(*self._rotated(projected, rope)) if self.ssm.window else None
        return self._output(x, recurrent, window)

    def step(
        self, x: torch.Tensor, rope: Rope, state: GatedDeltaNetState | None = None
    ) -> tuple[torch.Tensor, GatedDeltaNetState]:
        """One token, by the recurrence as written: `x` `[batch, 1, hidden]`, `rope` of its position."""
        config, batch = self.config, x.shape[0]
        projected = self.qkv(x)
        before = state.conv if state else projected.new_zeros(batch, self.ssm.conv_width - 1, config.qkv_size)
        q, k, v, g, beta = (t[:, 0] for t in self._recurrence_inputs(x, self.conv(projected, before)))
        memory = state.recurrent if state else q.new_zeros(batch, config.num_heads, config.head_dim, config.head_dim)
        memory = memory * g.exp()[..., None, None]
        value = beta[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, memory))
        memory = memory + k[..., None] * value[..., None, :]
        recurrent = torch.einsum("bhk,bhkv->bhv", q, memory)[:, None]
        after = GatedDeltaNetState(torch.cat([before, projected], dim=1)[:, 1:], memory)
        window = None
        if self.ssm.window:
            query, key, value = self._rotated(projected, rope)
            if state is not None and state.keys is not None and state.values is not None:
                key, value = torch.cat([state.keys, key], dim=2), torch.cat([state.values, value], dim=2)
            after.keys, after.values = key[:, :, -self.ssm.window :], value[:, :, -self.ssm.window :]
            window = self._window(query, after.keys, after.values)
        return self._output(x, recurrent, window), after

    def _recurrence_inputs(self, x: torch.Tensor, convolved: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v `[batch, tokens, q heads, head_dim]`, log decay and write strength without head_dim; float32."""
        config = self.config
        q, k, v = (
            part.unflatten(-1, (-1, config.head_dim)).float()
            for part in convolved.split([config.q_size, config.kv_size, config.kv_size], dim=-1)
        )
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6)
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        a, b = self.ab(x).float().chunk(2, dim=-1)
        g, beta = F.logsigmoid(a), torch.sigmoid(b)
        # States shared by a group are computed once per q head here: equal by construction, simple to check.
        k, v = (t.repeat_interleave(config.group_size, dim=2) for t in (k, v))
        if config.num_state_heads != config.num_heads:
            g, beta = (t.repeat_interleave(config.group_size, dim=2) for t in (g, beta))
        return q, k, v, g, beta

    def _rotated(self, projected: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k with RoPE and v, before conv and normalisation: `[batch, heads, tokens, head_dim]`."""
        config = self.config
        q, k, v = (
            part.unflatten(-1, (-1, config.head_dim))
            for part in projected.split([config.q_size, config.kv_size, config.kv_size], dim=-1)
        )
        return apply_rope(q, *rope).transpose(1, 2), apply_rope(k, *rope).transpose(1, 2), v.transpose(1, 2)

    def _window(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention to the last `window` tokens, the current one included; `[batch, tokens, heads, head_dim]`."""
        tokens, keys = q.shape[2], k.shape[2]
        query_at = torch.arange(keys - tokens, keys, device=q.device)[:, None]
        key_at = torch.arange(keys, device=q.device)[None, :]
        mask = (key_at <= query_at) & (key_at > query_at - self.ssm.window)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            scale=1 / math.sqrt(self.config.head_dim),
            enable_gqa=self.config.group_size > 1,
        )
        return out.transpose(1, 2)

    def _output(self, x: torch.Tensor, recurrent: torch.Tensor, window: torch.Tensor | None) -> torch.Tensor:
        heads = recurrent * self.gain.float()[:, None]
        if window is not None:
            share = torch.sigmoid(self.mix.float())[:, None]
            heads = share * window.float() + (1 - share) * heads
        gate = F.silu(self.gate_up(self.gate_down(x)))
        return self.out(heads.flatten(2).to(gate.dtype) * gate)
