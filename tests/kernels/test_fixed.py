"""Block fixed point: what it computes, how exact it is beside bfloat16 operands, and that rows stay apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from morph.kernels.native_backend import NativeKernels
from tests.kernels.memory import Pool, nan, native_kernels

BLOCK, ACTIVATION, WEIGHT = 192, 4095, 2730
"""As in native/fixed.h."""


def fixed_kernels(kv_heads: int = 1, threads: int = 3) -> NativeKernels:
    """Native kernels in bfloat16 that multiply prompts in fixed point."""
    return native_kernels(torch.bfloat16, kv_heads, threads, gemm="fixed")


def rounded(x: torch.Tensor, most: int) -> torch.Tensor:
    """Float64 values of rows after each block of k was rounded to integers of at most `most`."""
    parts = []
    for part in x.float().split(BLOCK, dim=1):
        top = part.abs().amax(1, keepdim=True)
        # In float32, as the kernel: at a tie one more or less bit decides.
        inverse = torch.where(top > 1e-30, torch.tensor(float(most)) / top, torch.zeros(()))
        integers = (part * inverse).round()
        assert integers.abs().max() <= most
        parts.append(integers.double() * (top * torch.tensor(1 / most)).double())
    return torch.cat(parts, dim=1)


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of the rounded operands in float64."""
    return rounded(x, ACTIVATION) @ rounded(weight, WEIGHT).T


@pytest.mark.parametrize(("n", "k"), [(64, 64), (32, 1), (70, 50), (33, 300), (1042, 576), (96, 1024), (40, 192)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_the_product_of_rounded_operands(n: int, k: int, with_bias: bool) -> None:
    kernels = fixed_kernels()
    weight, bias = torch.randn(n, k) / k**0.5, torch.randn(n) if with_bias else None
    packed = kernels.pack_linear(weight, bias)
    for rows in (1, 5, 12, 13, 96, 205, 500):
        # Outliers in some columns, as activations have them.
        x = torch.randn(rows, k) * torch.randn(k).exp()
        want = reference(x, weight.bfloat16()) + (0 if bias is None else bias.double())
        scale = want.abs().max()
        assert (kernels.prefill_linear(x, packed, out=nan(rows, n)) - want).abs().max() < 1e-5 * scale


@pytest.mark.parametrize(("d", "inner", "n"), [(576, 1536, 576), (64, 96, 64), (100, 224, 70)])
def test_mlp_is_the_product_of_rounded_operands(d: int, inner: int, n: int) -> None:
    kernels = fixed_kernels()
    gate_up, down = torch.randn(2 * inner, d) / d**0.5, torch.randn(n, inner) / inner**0.5
    packed = kernels.pack_linear(gate_up), kernels.pack_linear(down)
    assert kernels.fuses_mlp(*packed)
    for rows in (1, 13, 300):
        x = torch.randn(rows, d)
        gate, up = reference(x, gate_up.bfloat16()).chunk(2, dim=1)
        want = reference((F.silu(gate) * up).float(), down.bfloat16())
        got = kernels.prefill_mlp(x, *packed, out=nan(rows, n))
        # An inner value that lies on a tie may round to the neighbouring integer.
        assert (got - want).norm() / want.norm() < 5e-5


def test_an_mlp_with_biases_or_odd_width_is_not_fused() -> None:
    kernels = fixed_kernels()
    plain, biased = kernels.pack_linear(torch.randn(64, 32)), kernels.pack_linear(torch.randn(64, 32), torch.randn(64))
    down, odd = kernels.pack_linear(torch.randn(32, 32)), kernels.pack_linear(torch.randn(32, 33))
    assert kernels.fuses_mlp(plain, down)
    assert not kernels.fuses_mlp(biased, down) and not kernels.fuses_mlp(plain, odd)
    x = torch.randn(20, 32)
    want = F.silu(kernels.linear(x, biased)[:, :32]) * kernels.linear(x, biased)[:, 32:]
    got = kernels.prefill_mlp(x, biased, down)
    assert (got - kernels.linear(want, down)).norm() / got.norm() < 1e-5


def test_error_is_well_below_that_of_bfloat16_activations() -> None:
    kernels = fixed_kernels()
    weight = (torch.randn(576, 1536) / 40).bfloat16()
    x = torch.randn(400, 1536) * torch.randn(1536).exp()
    want = x.double() @ weight.double().T
    got = (kernels.prefill_linear(x, kernels.pack_linear(weight)) - want).norm() / want.norm()
    bfloat16 = (x.bfloat16().double() @ weight.double().T - want).norm() / want.norm()
    assert got < 0.6 * bfloat16


@pytest.mark.parametrize(("n", "k"), [(100, 300), (64, 576)])
def test_a_row_has_the_same_bits_in_any_batch(n: int, k: int) -> None:
    kernels = fixed_kernels()
    packed, gate_up, down = (
        kernels.pack_linear(torch.randn(*shape)) for shape in ((n, k), (2 * 64, k), (n, 64))
    )  # fmt: skip
    x = torch.randn(300, k)
    runs = (lambda x: kernels.prefill_linear(x, packed), lambda x: kernels.prefill_mlp(x, gate_up, down))
    for run in runs:
        alone = torch.cat([run(x[i : i + 1]) for i in range(300)])
        for rows in [*range(1, 30), 96, 97, 143, 300]:
            assert torch.equal(run(x[:rows]), alone[:rows]), rows
        assert torch.equal(run(x[101:300]), alone[101:])
    single = fixed_kernels(threads=1)
    assert torch.equal(single.prefill_linear(x, packed), kernels.prefill_linear(x, packed))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_row_shows_and_spares_the_others(poison: float) -> None:
    kernels = fixed_kernels()
    packed = kernels.pack_linear(torch.randn(64, 400))
    x = torch.randn(30, 400)
    clean = kernels.prefill_linear(x, packed)
    x[7, 391] = poison
    got = kernels.prefill_linear(x, packed)
    assert got[7].isnan().all()
    keep = torch.arange(30) != 7
    assert torch.equal(got[keep], clean[keep])


def test_zero_and_tiny_rows_and_weights() -> None:
    kernels = fixed_kernels()
    weight = torch.randn(64, 200)
    weight[3] = 0.0
    packed = kernels.pack_linear(weight)
    x = torch.randn(14, 200)
    x[2], x[5] = 0.0, x[5] * 1e-36
    got = kernels.prefill_linear(x, packed)
    assert got.isfinite().all() and (got[:, 3] == 0).all() and (got[2] == 0).all() and got[5].abs().max() < 1e-30


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 2, 128), (7, 1, 96), (16, 2, 64)])
@pytest.mark.parametrize(("rows", "start"), [(1, 0), (64, 0), (65, 0), (200, 37), (90, 300), (300, 64)])
def test_attention_against_float32(heads: int, kv_heads: int, dim: int, rows: int, start: int) -> None:
    exact, kernels = native_kernels(torch.bfloat16, kv_heads), fixed_kernels(kv_heads)
    pages = -(-(start + rows) // dim)
    pool = Pool.make(2, kv_heads * pages, dim, torch.bfloat16)
    pool.fill_kv(1, kv_heads, pages, start + rows)
    q = torch.randn(rows, heads * dim) * 2
    arguments = (pool.storage, pool.table[1], pages, start, dim**-0.5)
    want = exact.prefill_attention(q, *arguments, out=nan(rows, heads * dim))
    got = kernels.prefill_attention(q, *arguments, out=nan(rows, heads * dim))
    assert (got - want).norm() / want.norm() < 1.5e-3
    # Rows whose keys all lie in their own tile of 64 are float32.
    early = max(0, 64 - start)
    if early:
        assert (got[:early] - want[:early]).abs().max() < 1e-5


def test_attention_of_a_row_ignores_what_comes_after_and_beside_it() -> None:
    kernels = fixed_kernels(3)
    pages, total = 5, 300
    pool = Pool.make(1, 3 * pages, 64, torch.bfloat16)
    pool.fill_kv(0, 3, pages, total)
    q = torch.randn(total, 9 * 64)
    whole = kernels.prefill_attention(q, pool.storage, pool.table[0], pages, 0, 0.125)
    for begin, end in ((0, 1), (0, 70), (63, 65), (64, 200), (130, 300), (299, 300)):
        shorter = pool.copy()
        view = shorter.storage.view(torch.bfloat16).view(-1, 2, 64, 64)
        for head in range(3):
            for position in range(end, total):
                view[shorter.table[0, head * pages + position // 64], :, position % 64] = float("nan")
        part = kernels.prefill_attention(q[begin:end], shorter.storage, shorter.table[0], pages, begin, 0.125)
        assert torch.equal(part, whole[begin:end]), (begin, end)


def test_small_weights_keep_their_precision_beside_a_sink() -> None:
    """One early key takes nearly all weight; the sum over thousands of small ones must still be right."""
    exact, kernels = native_kernels(torch.bfloat16, 1), fixed_kernels(1)
    total, pages = 2048, 32
    pool = Pool.make(1, pages, 64, torch.bfloat16)
    view = pool.storage.view(torch.bfloat16).view(-1, 2, 64, 64)
    keys, values = torch.randn(total, 64) * 0.1, torch.ones(total, 64)
    keys[0], values[0] = 1.0, 0.0
    for position in range(total):
        unit = pool.table[0, position // 64]
        view[unit, 0, position % 64], view[unit, 1, position % 64] = (
            keys[position].bfloat16(),
            values[position].bfloat16(),
        )
    q = torch.ones(1, 64) * 1.2
    arguments = (pool.storage, pool.table[0], pages, total - 1, 0.125)
    want, got = exact.prefill_attention(q, *arguments), kernels.prefill_attention(q, *arguments)
    assert 0.02 < want.min() < 0.6  # most weight is on the sink, whose value is zero
    assert ((got - want) / want).abs().max() < 2e-3
