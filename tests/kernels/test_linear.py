"""Packed projections: exactness against float64, and rows that do not know of each other."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.memory import DTYPES, both, nan, native_kernels

SHAPES = [(64, 64), (32, 1), (70, 50), (33, 300), (1042, 576), (576, 1536), (96, 1024)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_float64(n: int, k: int, with_bias: bool, dtype: torch.dtype) -> None:
    kernels = native_kernels(dtype, 1)
    weight, bias = torch.randn(n, k) / k**0.5, torch.randn(n) if with_bias else None
    packed = kernels.pack_linear(weight, bias)
    for rows in (1, 5, 13, 96, 97, 205):
        x = torch.randn(rows, k)
        want = x.double() @ weight.to(dtype).double().T + (0 if bias is None else bias.double())
        assert (kernels.linear(x, packed, out=nan(rows, n)) - want).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(100, 300), (64, 576)])
def test_a_row_has_the_same_bits_in_any_batch(n: int, k: int, dtype: torch.dtype) -> None:
    kernels = native_kernels(dtype, 1)
    packed = kernels.pack_linear(torch.randn(n, k), torch.randn(n))
    x = torch.randn(300, k)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(300)])
    for rows in [*range(1, 41), 96, 97, 143, 300]:
        assert torch.equal(kernels.linear(x[:rows], packed), alone[:rows]), rows
    assert torch.equal(kernels.linear(x[100:300], packed), alone[100:])
    assert torch.equal(native_kernels(dtype, 1, threads=1).linear(x, packed), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_input_may_be_a_view_of_wider_rows(dtype: torch.dtype) -> None:
    kernels = native_kernels(dtype, 1)
    packed = kernels.pack_linear(torch.randn(70, 64))
    for rows in (1, 20, 150):
        wide = torch.full((rows, 90), float("nan"))
        wide[:, 10:74] = torch.randn(rows, 64)
        assert torch.equal(kernels.linear(wide[:, 10:74], packed), kernels.linear(wide[:, 10:74].contiguous(), packed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(70, 50), (96, 64)])
def test_rows_and_unpack_give_the_weight_back(n: int, k: int, dtype: torch.dtype) -> None:
    weight = torch.randn(n, k).to(dtype)
    for kernels in both(dtype, 1):
        packed = kernels.pack_linear(weight)
        assert (packed.n, packed.k, packed.dtype) == (n, k, dtype)
        assert torch.equal(packed.unpack(), weight)
        ids = torch.tensor([0, n - 1, 33, 33, 17])
        assert torch.equal(packed.rows(ids), weight[ids].float())
        assert torch.equal(packed.rows(ids.int()), weight[ids].float())


def test_onednn_path_is_the_same_product_in_bfloat16() -> None:
    weight, bias, x = torch.randn(100, 256) / 16, torch.randn(100), torch.randn(80, 256)
    kernels = native_kernels(torch.bfloat16, 1, gemm="onednn")
    packed = kernels.pack_linear(weight, bias)
    want = x.bfloat16().float() @ weight.bfloat16().float().T + bias
    got = kernels.prefill_linear(x, packed, out=nan(80, 100))
    assert (got - want).abs().max() < 0.05
    exact = native_kernels(torch.bfloat16, 1)
    assert not torch.equal(got, exact.prefill_linear(x, packed)), "oneDNN ran"
    assert torch.equal(kernels.linear(x, packed), exact.linear(x, packed)), "decode stays as it is"


def test_an_unknown_gemm_is_refused() -> None:
    with pytest.raises(ValueError, match="'blas'; use auto, float32, fixed or onednn"):
        native_kernels(torch.bfloat16, 1, gemm="blas")
