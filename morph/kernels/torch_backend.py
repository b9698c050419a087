"""Reference backend: every op in plain torch, on any device. Native kernels are tested against it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from morph.config import ModelConfig
from morph.kernels.gated_delta.reference import causal_conv, chunk_gated_delta_rule, l2_normalise
from morph.kernels.interface import Decoder, PackedLinear, SSMParams

SMALL_GEMM = 16
"""Float32 GEMMs of fewer rows are padded to this many: libraries switch algorithms below, and rows would differ."""


@dataclass(frozen=True, eq=False)
class TorchLinear:
    """A weight `[n, k]`, rounded to `dtype`.

    On CPU it is kept in float32: converting a bfloat16 weight in every call costs far more than the product.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    @property
    def n(self) -> int:
        """Output features."""
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        """Input features."""
        return self.weight.shape[1]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Embedding lookup, float32 `[count, k]`."""
        return self.weight[ids.long()].float()

    def unpack(self) -> torch.Tensor:
        """The weight, a copy."""
        return self.weight.to(self.dtype, copy=True)


class TorchKernels:
    """`Kernels` in plain torch.

    Args:
        device: where tensors live.
        dtype: of weights, keys and values: float32 or bfloat16.
        num_kv_heads: of the model.
    """

    name = "torch"
    activations = torch.float32

    def __init__(self, device: torch.device | str, dtype: torch.dtype, num_kv_heads: int) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.num_kv_heads = num_kv_heads

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """See `Kernels.pack_linear`."""
        kept = weight.to(self.device, self.dtype).contiguous()
        if self.device.type == "cpu":
            kept = kept.float()
        return TorchLinear(kept, None if bias is None else bias.float(), self.dtype)

    def linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Kernels.linear`."""
        assert isinstance(weight, TorchLinear)
        rows = x.shape[0]
        if 0 < rows < SMALL_GEMM:
            x = torch.cat([x, x.new_zeros(SMALL_GEMM - rows, x.shape[1])])
        return _into(out, F.linear(x, weight.weight.float(), weight.bias)[:rows])

    def prefill_linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Kernels.prefill_linear`; the same as `linear`."""
        return self.linear(x, weight, out)

    def fuses_mlp(self, gate_up: PackedLinear, down: PackedLinear) -> bool:
        """See `Kernels.fuses_mlp`."""
        return False

    def prefill_mlp(
        self, x: torch.Tensor, gate_up: PackedLinear, down: PackedLinear, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Kernels.prefill_mlp`."""
        return self.linear(self.silu_mul(self.linear(x, gate_up)), down, out)

    def decoder(
        self,
        config: ModelConfig,
        weights: Any,
        memory: Any,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sums: torch.Tensor,
    ) -> Decoder | None:
        """See `Kernels.decoder`; there is none."""
        return None

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Kernels.rms_norm`."""
        return _into(out, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)

    def add_rms_norm_(
        self,
        h: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Kernels.add_rms_norm_`."""
        h += delta
        return self.rms_norm(h, weight, eps, out)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Kernels.silu_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return _into(out, F.silu(gate) * up)

    def gate_silu_mul_(self, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """See `Kernels.gate_silu_mul_`."""
        o *= F.silu(z)
        return o

    def sum_tokens_(self, acc: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Kernels.sum_tokens_`. A running sum on CPU adds row after row."""
        if x.shape[0]:
            acc.copy_(torch.cat([acc[None], x.double()]).cumsum(0)[-1])
        return acc

    def rope_write_kv_(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        storage: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        max_pages: int,
    ) -> None:
        """See `Kernels.rope_write_kv_`."""
        dim, kv_heads = head_dim(storage), self.num_kv_heads
        heads = qkv.shape[1] // dim - 2 * kv_heads
        x = qkv.unflatten(1, (-1, dim))
        at = positions.long()
        for part, norm in ((x[:, :heads], q_norm), (x[:, heads : heads + kv_heads], k_norm)):
            normed = part if norm is None else self.rms_norm(part, norm, eps)
            part.copy_(rotate(normed, cos, sin, at))
        pages = kv_pages(storage, self.dtype)
        tokens = pages.shape[2]
        places = torch.arange(kv_heads, device=qkv.device)[None, :] * max_pages + (at // tokens)[:, None]
        units = table[slots.long()[:, None], places].long()
        for which, first in ((0, heads), (1, heads + kv_heads)):
            pages[units, which, (at % tokens)[:, None]] = x[:, first : first + kv_heads].to(self.dtype)

    def prefill_attention(
        self,
        q: torch.Tensor,
        storage: torch.Tensor,
        table_row: torch.Tensor,
        max_pages: int,
        start: int,
        scale: float,
        out: torch.Tensor | None = None,
        exact: bool = False,
    ) -> torch.Tensor:
        """See `Kernels.prefill_attention`."""
        rows, dim = q.shape[0], head_dim(storage)
        keys = start + rows
        k, v = self._gather(storage, table_row[: self.num_kv_heads * max_pages].view(-1, max_pages), keys)
        at = torch.arange(keys, device=q.device)
        mask = at[None, :] <= at[start:, None]
        o = attend(q.unflatten(1, (-1, dim)).transpose(0, 1), k, v, mask, scale)
        return _into(out, o.transpose(0, 1).flatten(1))

    def decode_attention(
        self,
        q: torch.Tensor,
        storage: torch.Tensor,
        table: torch.Tensor,
        max_pages: int,
        slots: torch.Tensor,
        lens: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Kernels.decode_attention`."""
        rows = [
            self.prefill_attention(q[i : i + 1], storage, table[slot], max_pages, length - 1, scale)
            for i, (slot, length) in enumerate(zip(slots.tolist(), lens.tolist(), strict=True))
        ]
        return _into(out, torch.cat(rows))

    def gdn_prefill(
        self,
        x_in: torch.Tensor,
        params: SSMParams,
        storage: torch.Tensor,
        table_row: torch.Tensor,
        conv_tail: torch.Tensor,
        has_state: bool,
        start: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Kernels.gdn_prefill`."""
        states = storage[table_row[: params.state_heads].long()].view(torch.float32)
        states = states.unflatten(1, (params.head_dim, params.head_dim))
        initial = states[None] if has_state else None
        qkv = x_in[None, :, : params.qkv_size]
        mixed, tail = causal_conv(qkv, params.conv_weight, conv_tail[None] if has_state else None)
        group = params.heads // params.kv_heads
        repeat = group if params.state_heads == params.heads else 1
        q, k, v = split_heads(mixed, params)
        q, k, v = l2_normalise(q), l2_normalise(k).repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
        ab = x_in[:, params.qkv_size : params.qkv_size + 2 * params.state_heads] + params.ab_bias
        a, b = ab[None].chunk(2, dim=-1)
        g, beta = F.logsigmoid(a), torch.sigmoid(b)
        if params.state_heads == params.heads:
            o, final = chunk_gated_delta_rule(q, k, v, g, beta, initial)
        else:
            # One query of the group at a time: all read the same states.
            shared = q.unflatten(2, (params.kv_heads, group)).unbind(3)
            parts = [chunk_gated_delta_rule(part, k, v, g, beta, initial) for part in shared]
            o, final = torch.stack([part[0] for part in parts], dim=3).flatten(2, 3), parts[0][1]
        o = o[0] * params.gain[:, None]
        if params.window:
            assert params.mix is not None
            share = torch.sigmoid(params.mix)[:, None]
            o = (
                share * self._window(x_in, params, storage, table_row, start if has_state else 0, start)
                + (1 - share) * o
            )
        storage[table_row[: params.state_heads].long()] = final[0].contiguous().flatten(1).view(torch.uint8)
        conv_tail.copy_(tail[0])
        return _into(out, o.flatten(1))

    def gdn_decode(
        self,
        x_in: torch.Tensor,
        params: SSMParams,
        storage: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        conv_tails: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Kernels.gdn_decode`."""
        rows = [
            self.gdn_prefill(x_in[i : i + 1], params, storage, table[slot], conv_tails[slot], True, position)
            for i, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True))
        ]
        return _into(out, torch.cat(rows))

    def _window(
        self,
        x_in: torch.Tensor,
        params: SSMParams,
        storage: torch.Tensor,
        table_row: torch.Tensor,
        known: int,
        start: int,
    ) -> torch.Tensor:
        """Sliding-window attention `[rows, heads, head_dim]`; `known` tokens before `start` are in the ring."""
        rows, window = x_in.shape[0], params.window
        at = torch.arange(start, start + rows, device=x_in.device)
        q, k, v = split_heads(x_in[:, : params.qkv_size], params)
        q, k = rotate(q, params.cos, params.sin, at), rotate(k, params.cos, params.sin, at)
        k, v = k.to(self.dtype), v.to(self.dtype)
        pages = kv_pages(storage, self.dtype)
        tokens = pages.shape[2]
        ring_pages = -(-window // tokens)
        ring = table_row[params.state_heads :][: params.kv_heads * ring_pages].long().view(-1, ring_pages)
        before = torch.arange(start - min(known, window - 1), start, device=x_in.device)
        place = before % window
        old = pages[ring[:, place // tokens], :, place % tokens]  # [kv_heads, before, 2, head_dim]
        keys = torch.cat([old[:, :, 0], k.transpose(0, 1)], dim=1).float()
        values = torch.cat([old[:, :, 1], v.transpose(0, 1)], dim=1).float()
        key_at = torch.cat([before, at])
        mask = (key_at[None, :] <= at[:, None]) & (key_at[None, :] > at[:, None] - window)
        o = attend(q.transpose(0, 1), keys, values, mask, params.head_dim**-0.5)
        kept = at[-window:] % window
        units, where = ring[:, kept // tokens], (kept % tokens).expand(params.kv_heads, -1)
        pages[units, 0, where] = k[-window:].transpose(0, 1)
        pages[units, 1, where] = v[-window:].transpose(0, 1)
        return o.transpose(0, 1)

    def _gather(self, storage: torch.Tensor, pages: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values float32 `[kv_heads, keys, head_dim]` of pages int32 `[kv_heads, max_pages]`."""
        all_pages = kv_pages(storage, self.dtype)
        needed = -(-keys // all_pages.shape[2])
        kv = all_pages[pages[:, :needed].long()].float()  # [kv_heads, pages, 2, page_tokens, head_dim]
        return kv[:, :, 0].flatten(1, 2)[:, :keys], kv[:, :, 1].flatten(1, 2)[:, :keys]


def head_dim(storage: torch.Tensor) -> int:
    """Head dim of a pool: a unit has head_dim^2 * 4 bytes."""
    return math.isqrt(storage.shape[1] // 4)


def kv_pages(storage: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The pool as pages `[units, 2 (K, V), page_tokens, head_dim]`, a view."""
    return storage.view(dtype).view(storage.shape[0], 2, -1, head_dim(storage))


def split_heads(qkv: torch.Tensor, params: SSMParams) -> list[torch.Tensor]:
    """`[..., qkv]` -> q `[..., heads, head_dim]`, k and v `[..., kv_heads, head_dim]`."""
    heads = qkv.unflatten(-1, (-1, params.head_dim))
    return list(heads.split([params.heads, params.kv_heads, params.kv_heads], dim=-2))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE, rotate-half: x `[rows, heads, head_dim]`, cos and sin `[max_context, head_dim / 2]`."""
    c, s = cos[positions][:, None], sin[positions][:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Grouped-query attention: q `[heads, rows, d]`, k, v `[kv_heads, keys, d]`, mask `[rows, keys]`.

    Heads of a group are folded into the rows and small products padded, so that results do not jump with the shape.
    """
    group = q.shape[0] // k.shape[0]
    scores = q.unflatten(0, (-1, group)) @ k[:, None].mT * scale
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v[:, None]).flatten(0, 1)


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if out is None else out.copy_(result)
