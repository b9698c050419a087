"""Gated DeltaNet mixer (Yang et al., 2024) as Morph converts attention into: identity-start conv, rank-r output gate,
no RoPE, optional attention window with a learned mix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from morph.config import ModelConfig
from morph.errors import UnsupportedModel
from morph.kernels.gated_delta import chunk_gated_delta_rule
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


class MixerSizes(NamedTuple):
    """Widths of q and of k (and of v), width of a head, q heads per kv head, q heads per state."""

    q: int
    kv: int
    head_dim: int
    group: int
    shared: int


def causal_depthwise(x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """Depthwise causal conv without activation: `x` `[batch, tokens, channels]`, `weight` `[channels, width]`."""
    width, tokens = weight.shape[1], x.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0)) if before is None else torch.cat([before.to(x.dtype), x], dim=1)
    out = padded[:, :tokens] * weight[:, 0]
    for tap in range(1, width):
        out = torch.addcmul(out, padded[:, tap : tap + tokens], weight[:, tap])
    return out


def mixer_inputs(x: torch.Tensor, weights: tuple[torch.Tensor, ...], sizes: MixerSizes) -> tuple[torch.Tensor, ...]:
    """Projected q, k, v in one, then what the recurrence takes; weights may be of a wider dtype than `x`.

    Args:
        x: normed input `[batch, tokens, hidden]`.
        weights: as `GatedDeltaNet.input_weights` gives them.
    """
    qkv, conv, ab, ab_bias = (weight.to(x.dtype) for weight in weights)
    projected = F.linear(x, qkv)
    return projected, *recurrence_inputs(causal_depthwise(projected, conv), F.linear(x, ab, ab_bias), sizes)


def recurrence_inputs(convolved: torch.Tensor, ab: torch.Tensor, sizes: MixerSizes) -> tuple[torch.Tensor, ...]:
    """q, k, v `[batch, tokens, q heads, head_dim]`, log decay and write strength without head_dim.

    All float32; q, k, v in half precision on CUDA where the model is, for the kernels there.
    """
    q, k, v = (
        part.unflatten(-1, (-1, sizes.head_dim)).float()
        for part in convolved.split([sizes.q, sizes.kv, sizes.kv], dim=-1)
    )
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6)
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    a, b = ab.float().chunk(2, dim=-1)
    g, beta = F.logsigmoid(a), torch.sigmoid(b)
    if convolved.is_cuda:
        q, k, v = q.to(convolved.dtype), k.to(convolved.dtype), v.to(convolved.dtype)
    # States shared by a group are computed once per q head here: equal by construction, simple to check.
    k, v = (t.repeat_interleave(sizes.group, dim=2) for t in (k, v))
    if sizes.shared != 1:
        g, beta = (t.repeat_interleave(sizes.shared, dim=2) for t in (g, beta))
    return q, k, v, g, beta


def mixer_output(
    x: torch.Tensor,
    recurrent: torch.Tensor,
    window: torch.Tensor | None,
    weights: tuple[torch.Tensor | None, ...],
) -> torch.Tensor:
    """Gain, mix with the window, output gate and projection: `[batch, tokens, hidden]` in the dtype of `x`.

    Args:
        x: normed input. recurrent, window: `[batch, tokens, heads, head_dim]`.
        weights: as `GatedDeltaNet.output_weights` gives them.
    """
    gain, down, up, up_bias, out, mix = weights
    assert gain is not None and down is not None and up is not None and up_bias is not None and out is not None
    heads = recurrent.float() * gain.float()[:, None]
    if window is not None:
        assert mix is not None, "a window comes with its mixing weights"
        share = torch.sigmoid(mix.float())[:, None]
        heads = share * window.float() + (1 - share) * heads
    gate = F.silu(F.linear(F.linear(x, down.to(x.dtype)), up.to(x.dtype), up_bias.to(x.dtype)))
    return F.linear(heads.flatten(2).to(x.dtype) * gate, out.to(x.dtype))


def rotated(projected: torch.Tensor, rope: Rope, sizes: MixerSizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k with RoPE and v, before conv and normalisation: `[batch, heads, tokens, head_dim]`."""
    q, k, v = (
        part.unflatten(-1, (-1, sizes.head_dim)) for part in projected.split([sizes.q, sizes.kv, sizes.kv], dim=-1)
    )
    return apply_rope(q, *rope).transpose(1, 2), apply_rope(k, *rope).transpose(1, 2), v.transpose(1, 2)


def masked_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int) -> torch.Tensor:
    """Attention to the last `size` tokens, the current one included; `[batch, tokens, heads, head_dim]`.

    Args:
        q: the last `tokens` of the keys' positions, `[batch, heads, tokens, head_dim]`.
        k, v: `[batch, kv heads, keys, head_dim]`.
    """
    tokens, keys = q.shape[2], k.shape[2]
    query_at = torch.arange(keys - tokens, keys, device=q.device)[:, None]
    key_at = torch.arange(keys, device=q.device)[None, :]
    mask = (key_at <= query_at) & (key_at > query_at - size)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def window_attention(projected: torch.Tensor, rope: Rope, sizes: MixerSizes, size: int) -> torch.Tensor:
    """`masked_window` of whole sequences from projected q, k, v `[batch, tokens, channels]`, linear in their length.

    Chunks of `size` queries attend to their own and the chunk before, which together hold every window.
    """
    q, k, v = rotated(projected, rope, sizes)
    batch, _, tokens, _ = q.shape
    if tokens <= 2 * size:
        return masked_window(q, k, v, size)
    chunks = (tokens + size - 1) // size

    def cut(x: torch.Tensor) -> torch.Tensor:
        """`[batch, chunks, heads, size, head_dim]`."""
        return F.pad(x, (0, 0, 0, chunks * size - tokens)).unflatten(2, (chunks, size)).transpose(1, 2)

    def with_previous(x: torch.Tensor) -> torch.Tensor:
        x = cut(x.repeat_interleave(sizes.group, dim=1))
        before = F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, :chunks]
        return torch.cat([before, x], dim=3).flatten(0, 1)

    query_at = torch.arange(size, device=q.device)[:, None] + size
    key_at = torch.arange(2 * size, device=q.device)[None, :]
    near = (key_at <= query_at) & (key_at > query_at - size)
    # The first chunk has nothing before it.
    first = torch.arange(chunks, device=q.device)[:, None, None] == 0
    mask = (near & ~(first & (key_at < size))).repeat(batch, 1, 1)[:, None]
    out = F.scaled_dot_product_attention(cut(q).flatten(0, 1), with_previous(k), with_previous(v), attn_mask=mask)
    return out.transpose(1, 2).reshape(batch, chunks * size, -1, sizes.head_dim)[:, :tokens]


class DepthwiseConv(nn.Module):
    """Causal depthwise convolution without activation; the last tap meets the current token."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, width))
        nn.init.ones_(self.weight[:, -1])

    def forward(self, x: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        """`x` `[batch, tokens, channels]`; `before` `[batch, width - 1, channels]` are the tokens before, or zeros."""
        return causal_depthwise(x, self.weight, before)


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
        q, k = attention.q_proj.weight, attention.k_proj.weight
        if self.config.qk_norm:
            # Exact for the recurrence: it L2-normalises, so of a QK-norm only the weights' direction is left.
            q = q * attention.q_norm.weight.repeat(self.config.num_heads)[:, None]
            k = k * attention.k_norm.weight.repeat(self.config.num_kv_heads)[:, None]
        self.qkv.weight.copy_(torch.cat([q, k, attention.v_proj.weight]))
        self.out.weight.copy_(attention.o_proj.weight)
        self.conv.weight.zero_()
        self.conv.weight[:, -1] = 1.0
        self.gain.fill_(1.0)
        self.reset_gates()
        if self.ssm.window:
            self.mix.zero_()

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Mixer output `[batch, tokens, hidden]` of whole sequences `x` `[batch, tokens, hidden]`."""
        projected, q, k, v, g, beta = mixer_inputs(x, self.input_weights(), self.sizes)
        recurrent, _ = chunk_gated_delta_rule(q, k, v, g, beta)
        window = self.window(projected, rope) if self.ssm.window else None
        return mixer_output(x, recurrent, window, self.output_weights())

    @property
    def sizes(self) -> MixerSizes:
        """What `mixer_inputs` needs to know about the shape."""
        config = self.config
        shared = config.group_size if config.num_state_heads != config.num_heads else 1
        return MixerSizes(config.q_size, config.kv_size, config.head_dim, config.group_size, shared)

    def input_weights(self) -> tuple[torch.Tensor, ...]:
        """Weights of `mixer_inputs` in its order."""
        return self.qkv.weight, self.conv.weight, self.ab.weight, self.ab.bias

    def output_weights(self) -> tuple[torch.Tensor | None, ...]:
        """Weights of `mixer_output` in its order; the last is None without a window."""
        up = self.gate_up
        mix = self.mix if self.ssm.window else None
        return self.gain, self.gate_down.weight, up.weight, up.bias, self.out.weight, mix

    def window(self, projected: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Window attention of whole sequences, `[batch, tokens, heads, head_dim]`, from projected q, k, v."""
        return window_attention(projected, rope, self.sizes, self.ssm.window)

    def step(
        self, x: torch.Tensor, rope: Rope, state: GatedDeltaNetState | None = None
    ) -> tuple[torch.Tensor, GatedDeltaNetState]:
        """One token, by the recurrence as written: `x` `[batch, 1, hidden]`, `rope` of its position."""
        config, batch = self.config, x.shape[0]
        projected = self.qkv(x)
        before = state.conv if state else projected.new_zeros(batch, self.ssm.conv_width - 1, config.qkv_size)
        inputs = recurrence_inputs(self.conv(projected, before), self.ab(x), self.sizes)
        q, k, v, g, beta = (t[:, 0].float() for t in inputs)
        memory = state.recurrent if state else q.new_zeros(batch, config.num_heads, config.head_dim, config.head_dim)
        memory = memory * g.exp()[..., None, None]
        value = beta[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, memory))
        memory = memory + k[..., None] * value[..., None, :]
        recurrent = torch.einsum("bhk,bhkv->bhv", q, memory)[:, None]
        after = GatedDeltaNetState(torch.cat([before, projected], dim=1)[:, 1:], memory)
        window = None
        if self.ssm.window:
            query, key, value = rotated(projected, rope, self.sizes)
            if state is not None and state.keys is not None and state.values is not None:
                key, value = torch.cat([state.keys, key], dim=2), torch.cat([state.values, value], dim=2)
            after.keys, after.values = key[:, :, -self.ssm.window :], value[:, :, -self.ssm.window :]
            window = masked_window(query, after.keys, after.values, self.ssm.window)
        return mixer_output(x, recurrent, window, self.output_weights()), after
