"""Norms, activations and running sums: native against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.memory import both, nan

SHAPES = [(1, 64), (3, 576), (7, 100), (200, 576), (1, 5)]


@pytest.mark.parametrize(("rows", "d"), SHAPES)
def test_rms_norm(rows: int, d: int) -> None:
    native, reference = both(torch.float32, 1)
    x, weight = torch.randn(rows, d) * 3, torch.randn(d)
    want = reference.rms_norm(x, weight, 1e-5)
    assert torch.allclose(native.rms_norm(x, weight, 1e-5, out=nan(rows, d)), want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("rows", "d"), SHAPES)
def test_add_rms_norm_adds_in_place_and_may_write_over_the_delta(rows: int, d: int) -> None:
    native, reference = both(torch.float32, 1)
    h, delta, weight = torch.randn(rows, d), torch.randn(rows, d), torch.randn(d)
    mine = h.clone()
    want = reference.add_rms_norm_(h, delta, weight, 1e-5)
    got = native.add_rms_norm_(mine, delta, weight, 1e-5, out=delta)
    assert got is delta
    assert torch.equal(mine, h)
    assert torch.allclose(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("rows", "n"), SHAPES)
def test_silu_mul(rows: int, n: int) -> None:
    native, reference = both(torch.float32, 1)
    x = torch.randn(rows, 2 * n) * 10
    want = reference.silu_mul(x)
    assert torch.allclose(native.silu_mul(x, out=nan(rows, n)), want, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize(("rows", "n"), SHAPES)
def test_gate_silu_mul(rows: int, n: int) -> None:
    native, reference = both(torch.float32, 1)
    o, z = torch.randn(rows, n), torch.randn(rows, n) * 10
    want = reference.gate_silu_mul_(o.clone(), z)
    assert torch.allclose(native.gate_silu_mul_(o, z), want, atol=1e-6, rtol=2e-6)


def test_silu_of_extreme_values_is_finite() -> None:
    native, reference = both(torch.float32, 1)
    z = torch.tensor([[-1e30, -200.0, -104.0, -88.0, 0.0, 88.0, 200.0, 1e30]])
    got = native.gate_silu_mul_(torch.ones_like(z), z)
    assert torch.allclose(got, reference.gate_silu_mul_(torch.ones_like(z), z), atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("d", [576, 100])
def test_sums_have_the_same_bits_however_the_tokens_are_cut(d: int) -> None:
    native, reference = both(torch.float32, 1)
    x = torch.randn(150, d)
    want = reference.sum_tokens_(torch.zeros(d, dtype=torch.float64), x)
    for cut in (0, 1, 64, 149):
        acc = torch.zeros(d, dtype=torch.float64)
        native.sum_tokens_(acc, x[:cut])
        native.sum_tokens_(acc, x[cut:])
        assert torch.equal(acc, want)
