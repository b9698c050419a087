"""Gated DeltaNet, one token per request, states in place.

Two kernels: the first makes conv, L2 norm and the window's attention and moves the conv tail and the ring on (one
program per request and kv head, the only one that touches them); the second updates the states, each program a strip
of columns, and mixes the outputs. The cut between them is where q heads begin to share k and v.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from morph.kernels.interface import SSMParams


class Scratch(NamedTuple):
    """Between the two kernels, float32: q and window `[rows, heads, d]`, k and v `[rows, kv_heads, d]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window: torch.Tensor

    @classmethod
    def make(cls, rows: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> Scratch:
        """Buffers for `rows` rows."""
        q, k = (rows, heads, dim), (rows, kv_heads, dim)
        return cls(*(torch.empty(shape, device=device) for shape in (q, k, k, q)))


@triton.jit
def _conv(x, w, tail, channel, stride_tail, TAPS: tl.constexpr):
    y = tl.load(x + channel).to(tl.float32) * tl.load(w + channel * (TAPS + 1) + TAPS)
    for tap in tl.static_range(TAPS):
        y += tl.load(tail + tap * stride_tail + channel) * tl.load(w + channel * (TAPS + 1) + tap)
    return y


@triton.jit
def _move_tail(x, tail, channel, stride_tail, TAPS: tl.constexpr):
    for tap in tl.static_range(TAPS - 1):
        tl.store(tail + tap * stride_tail + channel, tl.load(tail + (tap + 1) * stride_tail + channel))
        # The next tap's store goes where this load read.
        tl.debug_barrier()
    if TAPS > 0:
        tl.store(tail + (TAPS - 1) * stride_tail + channel, tl.load(x + channel).to(tl.float32))


@triton.jit
def _rotated(x, channel, cos, sin, position, d, D: tl.constexpr):
    other = (d + D // 2) % D
    own = tl.load(x + channel + d).to(tl.float32)
    partner = tl.load(x + channel + other).to(tl.float32)
    angle = position.to(tl.int64) * (D // 2) + d % (D // 2)
    c = tl.load(cos + angle)
    s = tl.load(sin + angle)
    return own * c + tl.where(d < D // 2, -partner, partner) * s


@triton.jit
def _prepare(
    inputs, conv_w, tails, cos, sin, pages, table, rows, slots, positions, count, sq, sk, sv, sw, stride_x, stride_tail,
    stride_tap, stride_table, state_heads, ring_pages, scale, UNIT: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PT: tl.constexpr, TAPS: tl.constexpr,
    WINDOW: tl.constexpr, WP: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    kv_head = tl.program_id(1)
    if i >= tl.load(count):
        return
    row = i
    if MAPPED:
        row = tl.load(rows + i)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    i = i.to(tl.int64)
    x = inputs + i * stride_x
    tail = tails + slot * stride_tail
    d = tl.arange(0, D)
    k_channel = (HEADS + kv_head) * D
    v_channel = (HEADS + KV_HEADS + kv_head) * D
    k = _conv(x, conv_w, tail, k_channel + d, stride_tap, TAPS)
    v = _conv(x, conv_w, tail, v_channel + d, stride_tap, TAPS)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    tl.store(sk + (i * KV_HEADS + kv_head) * D + d, k)
    tl.store(sv + (i * KV_HEADS + kv_head) * D + d, v)
    for g in tl.static_range(GROUP):
        head = kv_head * GROUP + g
        q = _conv(x, conv_w, tail, head * D + d, stride_tap, TAPS)
        q = q * tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6)
        tl.store(sq + (i * HEADS + head) * D + d, q)
    # All threads have read the tail before any moves it on.
    tl.debug_barrier()
    _move_tail(x, tail, k_channel + d, stride_tap, TAPS)
    _move_tail(x, tail, v_channel + d, stride_tap, TAPS)
    for g in tl.static_range(GROUP):
        _move_tail(x, tail, (kv_head * GROUP + g) * D + d, stride_tap, TAPS)
    if WINDOW > 0:
        new_k = _rotated(x, k_channel, cos, sin, position, d, D).to(pages.dtype.element_ty)
        new_v = tl.load(x + v_channel + d).to(pages.dtype.element_ty)
        ring = table + slot * stride_table + state_heads + kv_head * ring_pages
        current = position % WINDOW
        place = tl.arange(0, WP)
        distance = (current - place + WINDOW) % WINDOW
        seen = (place < WINDOW) & (distance > 0) & (distance <= position)
        unit = tl.load(ring + place // PT, mask=place < WINDOW, other=0).to(tl.int64)
        at = pages + (unit * UNIT + (place % PT) * D)[:, None] + d[None, :]
        keys = tl.load(at, mask=seen[:, None], other=0.0).to(tl.float32)
        values = tl.load(at + PT * D, mask=seen[:, None], other=0.0).to(tl.float32)
        for g in tl.static_range(GROUP):
            head = kv_head * GROUP + g
            q = _rotated(x, head * D, cos, sin, position, d, D)
            scores = tl.where(seen, tl.sum(keys * q[None, :], axis=1) * scale, -1e30)
            own = tl.sum(new_k.to(tl.float32) * q, axis=0) * scale
            best = tl.maximum(tl.max(scores, axis=0), own)
            weight = tl.exp2(scores - best)
            own = tl.exp2(own - best)
            o = tl.sum(values * weight[:, None], axis=0) + own * new_v.to(tl.float32)
            tl.store(sw + (i * HEADS + head) * D + d, o / (tl.sum(weight, axis=0) + own))
        to = tl.load(ring + current // PT).to(tl.int64) * UNIT + (current % PT) * D
        tl.store(pages + to + d, new_k)
        tl.store(pages + to + PT * D + d, new_v)


@triton.jit
def _update(
    inputs, ab_bias, gain, mix, states, table, rows, slots, count, sq, sk, sv, sw, out, stride_x, stride_table,
    stride_out, qkv_size, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, STATE_HEADS: tl.constexpr, D: tl.constexpr,
    BV: tl.constexpr, WINDOW: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    state_head = tl.program_id(0) // (D // BV)
    strip = tl.program_id(0) % (D // BV)
    i = tl.program_id(1)
    if i >= tl.load(count):
        return
    row = i
    if MAPPED:
        row = tl.load(rows + i)
    slot = tl.load(slots + row).to(tl.int64)
    i = i.to(tl.int64)
    unit = tl.load(table + slot * stride_table + state_head).to(tl.int64)
    d = tl.arange(0, D)
    c = strip * BV + tl.arange(0, BV)
    at = states + unit * (D * D) + d[:, None] * D + c[None, :]
    state = tl.load(at)
    ab = inputs + i * stride_x + qkv_size
    a = tl.load(ab + state_head).to(tl.float32) + tl.load(ab_bias + state_head)
    b = tl.load(ab + STATE_HEADS + state_head).to(tl.float32) + tl.load(ab_bias + STATE_HEADS + state_head)
    # The decay is exp(logsigmoid(a)) = sigmoid(a).
    decay = 1.0 / (1.0 + tl.exp(-a))
    write = 1.0 / (1.0 + tl.exp(-b))
    kv_head = state_head // (STATE_HEADS // KV_HEADS)
    k = tl.load(sk + (i * KV_HEADS + kv_head) * D + d)
    v = tl.load(sv + (i * KV_HEADS + kv_head) * D + c)
    state = state * decay
    value = write * (v - tl.sum(state * k[:, None], axis=0))
    state = state + k[:, None] * value[None, :]
    tl.store(at, state)
    for g in tl.static_range(HEADS // STATE_HEADS):
        head = state_head * (HEADS // STATE_HEADS) + g
        q = tl.load(sq + (i * HEADS + head) * D + d)
        o = tl.sum(state * q[:, None], axis=0) * tl.load(gain + head)
        if WINDOW > 0:
            share = 1.0 / (1.0 + tl.exp(-tl.load(mix + head)))
            o = share * tl.load(sw + (i * HEADS + head) * D + c) + (1.0 - share) * o
        tl.store(out + i * stride_out + head * D + c, o.to(out.dtype.element_ty))


def gdn_decode(
    inputs: torch.Tensor,
    params: SSMParams,
    storage: torch.Tensor,
    dtype: torch.dtype,
    table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    count: torch.Tensor,
    conv_tails: torch.Tensor,
    scratch: Scratch,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
    launch: tuple[int, int] = (32, 4),
) -> torch.Tensor:
    """See `Kernels.gdn_decode`; rows and count as in `attention_decode.decode_attention`.

    Args:
        storage: uint8 `[units, unit_bytes]`. dtype: of the window ring.
        conv_tails: float32 `[slots, taps, qkv]`, a view of one block.
        launch: columns of a state per program, warps.
    """
    pages, states = storage.view(dtype), storage.view(torch.float32)
    dim, window = params.head_dim, params.window
    tokens = pages.shape[1] // (2 * dim)
    mapped, mapping = rows is not None, count if rows is None else rows
    _prepare[(out.shape[0], params.kv_heads)](
        inputs, params.conv_weight, conv_tails, params.cos, params.sin, pages, table, mapping, slots, positions, count,
        *scratch, inputs.stride(0), conv_tails.stride(0), conv_tails.stride(1), table.stride(0), params.state_heads,
        -(-window // tokens), dim**-0.5 * 1.4426950408889634, UNIT=pages.shape[1], HEADS=params.heads,
        KV_HEADS=params.kv_heads, GROUP=params.heads // params.kv_heads, D=dim, PT=tokens,
        TAPS=params.conv_weight.shape[1] - 1, WINDOW=window, WP=triton.next_power_of_2(max(1, window)), MAPPED=mapped,
        num_warps=4,
    )  # fmt: skip
    strip = min(launch[0], dim)
    _update[(params.state_heads * (dim // strip), out.shape[0])](
        inputs, params.ab_bias, params.gain, params.gain if params.mix is None else params.mix, states, table, mapping,
        slots, count, *scratch, out, inputs.stride(0), table.stride(0), out.stride(0), params.qkv_size,
        HEADS=params.heads, KV_HEADS=params.kv_heads, STATE_HEADS=params.state_heads, D=dim, BV=strip, WINDOW=window,
        MAPPED=mapped, num_warps=launch[1],
    )  # fmt: skip
    return out
