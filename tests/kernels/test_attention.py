"""Paged attention and the KV write: native against the reference, bits that do not depend on company or tiling."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.memory import DTYPES, Pool, both, nan, native_kernels, rope_tables

HEADS = [(9, 3), (4, 4), (8, 1), (10, 2)]


def pages_of(tokens: int, dim: int, dtype: torch.dtype) -> int:
    return -(-tokens // (2 * dim // dtype.itemsize))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_prefill_equals_the_reference(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    native, reference = both(dtype, kv_heads)
    tokens = 2 * dim + 37
    max_pages = pages_of(tokens, dim, dtype) + 1
    pool = Pool.make(1, kv_heads * max_pages, dim, dtype)
    pool.fill_kv(0, kv_heads, max_pages, tokens)
    q = torch.randn(tokens, heads * dim + 16)[:, : heads * dim]
    arguments = (pool.storage, pool.table[0], max_pages)
    want = reference.prefill_attention(q, *arguments, 0, dim**-0.5)
    got = native.prefill_attention(q, *arguments, 0, dim**-0.5, out=nan(tokens, heads * dim))
    assert (got - want).abs().max() < 1e-5
    # The same bits from any start: what a prefix hit needs.
    for start in (1, 63, 64, 65, tokens - 1):
        rest = native.prefill_attention(q[start:], *arguments, start, dim**-0.5)
        assert torch.equal(rest, got[start:]), start
    alone = native_kernels(dtype, kv_heads, threads=1).prefill_attention(q, *arguments, 0, dim**-0.5)
    assert torch.equal(alone, got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_of_one_token(dtype: torch.dtype) -> None:
    native, reference = both(dtype, 1)
    pool = Pool.make(1, 1, 64, dtype)
    pool.fill_kv(0, 1, 1, 1)
    q = torch.randn(1, 3 * 64)
    want = reference.prefill_attention(q, pool.storage, pool.table[0], 1, 0, 0.125)
    assert torch.allclose(native.prefill_attention(q, pool.storage, pool.table[0], 1, 0, 0.125), want, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_decode_equals_the_reference(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    native, reference = both(dtype, kv_heads)
    lens = torch.tensor([1, 17, 256, 300, 513], dtype=torch.int32)
    slots = torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32)
    max_pages = pages_of(520, dim, dtype)
    pool = Pool.make(5, kv_heads * max_pages, dim, dtype)
    for slot, length in zip(slots.tolist(), lens.tolist(), strict=True):
        pool.fill_kv(slot, kv_heads, max_pages, length)
    q = torch.randn(5, heads * dim + 16)[:, : heads * dim]
    arguments = (pool.storage, pool.table, max_pages)
    want = reference.decode_attention(q, *arguments, slots, lens, dim**-0.5)
    got = native.decode_attention(q, *arguments, slots, lens, dim**-0.5, out=nan(5, heads * dim))
    assert (got - want).abs().max() < 1e-5
    for i in range(5):
        alone = native.decode_attention(q[i : i + 1], *arguments, slots[i : i + 1], lens[i : i + 1], dim**-0.5)
        assert torch.equal(alone[0], got[i])


@pytest.mark.parametrize("large", [1e3, 1e4])
def test_large_scores_do_not_overflow(large: float) -> None:
    native, reference = both(torch.float32, 1)
    pool = Pool.make(1, 4, 32, torch.float32)
    pool.fill_kv(0, 1, 4, 60)
    q = torch.randn(60, 32) * large
    want = reference.prefill_attention(q, pool.storage, pool.table[0], 4, 0, 1.0)
    got = native.prefill_attention(q, pool.storage, pool.table[0], 4, 0, 1.0)
    # Scores near 1e4 differ by rounding alone: compare where one key has clearly won.
    assert torch.isfinite(got).all()
    assert ((got - want).abs() < 1e-2).float().mean() > 0.95
    slots, lens = torch.zeros(1, dtype=torch.int32), torch.tensor([60], dtype=torch.int32)
    last = native.decode_attention(q[-1:], pool.storage, pool.table, 4, slots, lens, 1.0)
    assert torch.isfinite(last).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_rope_writes_rotated_keys_and_values(dim: int, qk_norm: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, rows = 6, 2, 40
    native, reference = both(dtype, kv_heads)
    max_pages = pages_of(300, dim, dtype)
    pool = Pool.make(3, kv_heads * max_pages, dim, dtype)
    cos, sin = rope_tables(300, dim)
    norms = (torch.randn(dim), torch.randn(dim)) if qk_norm else (None, None)
    positions = torch.randperm(300)[:rows].int()
    slots = torch.randint(0, 3, (rows,)).int()
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(rows, width + 8)
    mine, other = qkv.clone(), pool.copy()
    reference.rope_write_kv_(
        qkv[:, :width], cos, sin, positions, *norms, 1e-5, pool.storage, pool.table, slots, max_pages
    )
    native.rope_write_kv_(
        mine[:, :width], cos, sin, positions, *norms, 1e-5, other.storage, other.table, slots, max_pages
    )
    assert torch.allclose(mine, qkv, atol=2e-6, rtol=2e-6)
    ours, theirs = other.storage.view(dtype).float(), pool.storage.view(dtype).float()
    assert torch.equal(ours.isnan(), theirs.isnan()), "bytes outside of the rows' places were touched"
    assert torch.allclose(ours.nan_to_num(), theirs.nan_to_num(), atol=1e-5, rtol=1e-2)


def test_values_round_to_nearest_even() -> None:
    native, reference = both(torch.bfloat16, 1)
    pool = Pool.make(1, 1, 32, torch.bfloat16)
    other = pool.copy()
    cos, sin = rope_tables(4, 32)
    qkv = torch.randn(1, 96) * 100
    # Ties: a mantissa that ends in exactly half of the last bfloat16 place.
    qkv[0, 64:80] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 5 * 2**-8] * 4)
    position, slot = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for kernels, where in ((native, pool), (reference, other)):
        kernels.rope_write_kv_(qkv.clone(), cos, sin, position, None, None, 1e-5, where.storage, where.table, slot, 1)
    assert pool.same_bytes(other)


def test_units_beyond_four_gigabytes_are_reached() -> None:
    """Offsets are 64 bits wide: a unit of 64 KB at number 70000 lies past 4 GB. The file is sparse."""
    dim, kv_heads = 128, 1
    native = native_kernels(torch.bfloat16, kv_heads)
    storage = torch.empty((70_001, dim * dim * 4), dtype=torch.uint8)  # untouched memory costs nothing
    table = torch.tensor([[70_000]], dtype=torch.int32)
    cos, sin = rope_tables(4, dim)
    qkv = torch.randn(1, 3 * dim)
    zero = torch.zeros(1, dtype=torch.int32)
    native.rope_write_kv_(qkv, cos, sin, zero, None, None, 1e-5, storage, table, zero, 1)
    one = torch.ones(1, dtype=torch.int32)
    value = qkv[:, 2 * dim :].bfloat16().float()
    assert torch.equal(native.decode_attention(qkv[:, :dim], storage, table, 1, zero, one, 1.0), value)
    assert torch.equal(native.prefill_attention(qkv[:, :dim], storage, table[0], 1, 0, 1.0), value)
