"""Gated DeltaNet over unit pages: native against the reference and the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from morph.kernels.gated_delta import causal_conv, l2_normalise, sequential_gated_delta_rule
from morph.kernels.interface import SSMParams
from morph.kernels.torch_backend import split_heads
from tests.kernels.memory import DTYPES, Pool, both, nan, native_kernels, ssm_params

LENGTHS = [1, 2, 3, 5, 16, 63, 64, 65, 130, 300]


def bound(dtype: torch.dtype, window: int) -> float:
    """Largest difference between backends: a rotated key at a tie may round to either bfloat16 neighbour."""
    return 5e-3 if window and dtype is torch.bfloat16 else 2e-5


def make(params: SSMParams, dtype: torch.dtype, slots: int = 1) -> tuple[Pool, torch.Tensor]:
    """A pool and conv tails `[slots, width - 1, qkv]`, both full of NaN."""
    per_page = 2 * params.head_dim // dtype.itemsize
    width = params.state_heads + params.kv_heads * (-(-params.window // per_page))
    tails = nan(slots, 2, params.conv_weight.shape[1] - 1, params.qkv_size)[:, 1]
    return Pool.make(slots, width, params.head_dim, dtype), tails


def inputs(params: SSMParams, rows: int, similar: bool = False) -> torch.Tensor:
    """Projected inputs with columns beyond those that the kernel reads, which are NaN."""
    x = nan(rows, params.qkv_size + 2 * params.state_heads + 8)
    x[:, :-8] = torch.randn(rows, x.shape[1] - 8)
    if similar:
        x[:, : params.qkv_size] = torch.randn(params.qkv_size) + 1e-2 * x[:, : params.qkv_size]
    return x


def oracle(x: torch.Tensor, params: SSMParams) -> torch.Tensor:
    """Output of a whole sequence by the recurrence in float64; no window."""
    mixed, _ = causal_conv(x[None, :, : params.qkv_size], params.conv_weight)
    q, k, v = split_heads(mixed, params)
    group = params.heads // params.kv_heads
    k, v = l2_normalise(k).repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    ab = x[None, :, params.qkv_size : params.qkv_size + 2 * params.state_heads] + params.ab_bias
    a, b = (part.repeat_interleave(params.heads // params.state_heads, 2) for part in ab.chunk(2, dim=-1))
    o, _ = sequential_gated_delta_rule(l2_normalise(q), k, v, F.logsigmoid(a), torch.sigmoid(b))
    return (o[0] * params.gain[:, None]).flatten(1)


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("state_heads", ["q", "kv"])
@pytest.mark.parametrize("similar", [False, True])
def test_prefill_equals_the_oracle(dim: int, state_heads: str, similar: bool) -> None:
    params = ssm_params(6, 2, dim, state_heads, window=0)
    for backend in both(torch.bfloat16, 2):
        for rows in LENGTHS if dim == 64 else (65,):
            pool, tails = make(params, torch.bfloat16)
            x = inputs(params, rows, similar)
            out = nan(rows, 6 * dim)
            backend.gdn_prefill(x, params, pool.storage, pool.table[0], tails[0], False, 0, out=out)
            want = oracle(x, params)
            assert (out - want).abs().max() / want.abs().max().clamp_min(1) < 1e-5, (backend.name, rows)


@pytest.mark.parametrize("strong", [-1000.0, -60.0])
def test_tokens_that_erase_the_state_cost_no_digits(strong: float) -> None:
    params = ssm_params(2, 1, 64, "q", window=0)
    x = inputs(params, 200)
    x[::7, params.qkv_size : params.qkv_size + 2] = strong
    want = oracle(x, params)
    for backend in both(torch.float32, 1):
        pool, tails = make(params, torch.float32)
        got = backend.gdn_prefill(x, params, pool.storage, pool.table[0], tails[0], False, 0)
        assert (got - want).abs().max() < 1e-5 * want.abs().max().clamp_min(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_heads", ["q", "kv"])
@pytest.mark.parametrize("window", [0, 5, 64, 80])
@pytest.mark.parametrize("cut", [1, 2, 70, 129])
def test_a_continued_prefill_equals_the_reference(cut: int, window: int, state_heads: str, dtype: torch.dtype) -> None:
    params = ssm_params(6, 2, 64, state_heads, window)
    native, reference = both(dtype, 2)
    x = inputs(params, 150)
    pool, tails = make(params, dtype)
    other, other_tails = pool.copy(), tails.clone()
    whole_pool, whole_tails = pool.copy(), tails.clone()
    whole = native.gdn_prefill(x, params, whole_pool.storage, pool.table[0], whole_tails[0], False, 0)
    for begin, end in ((0, cut), (cut, 150)):
        got = native.gdn_prefill(
            x[begin:end], params, pool.storage, pool.table[0], tails[0], begin > 0, begin, out=nan(end - begin, 384)
        )
        want = reference.gdn_prefill(
            x[begin:end], params, other.storage, pool.table[0], other_tails[0], begin > 0, begin
        )
        assert (got - want).abs().max() < bound(dtype, window)
        assert torch.equal(tails, other_tails)
        assert (got - whole[begin:end]).abs().max() < 2e-5
    states = pool.table[0, : params.state_heads].long()
    ours, theirs = pool.storage[states].view(torch.float32), other.storage[states].view(torch.float32)
    assert (ours - theirs).abs().max() < 2e-5
    assert_other_units_equal(pool, other, states, dtype)


def assert_other_units_equal(pool: Pool, other: Pool, states: torch.Tensor, dtype: torch.dtype) -> None:
    """Rings agree (to a rounding of rotated keys) and nothing else was touched."""
    rest = torch.ones(pool.storage.shape[0], dtype=torch.bool)
    rest[states] = False
    ours, theirs = pool.storage[rest].view(dtype).float(), other.storage[rest].view(dtype).float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.allclose(ours.nan_to_num(), theirs.nan_to_num(), atol=1e-5, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("state_heads", ["q", "kv"])
@pytest.mark.parametrize("window", [0, 7, 64])
def test_decode_continues_prefill(window: int, state_heads: str, dim: int, dtype: torch.dtype) -> None:
    params = ssm_params(6, 2, dim, state_heads, window)
    native, reference = both(dtype, 2)
    lengths, steps, slots = [1, 3, 66], 12, torch.tensor([2, 0, 3], dtype=torch.int32)
    pool, tails = make(params, dtype, slots=4)
    sequences = [inputs(params, length + steps) for length in lengths]
    for slot, length, x in zip(slots.tolist(), lengths, sequences, strict=True):
        native.gdn_prefill(x[:length], params, pool.storage, pool.table[slot], tails[slot], False, 0)
    other, other_tails = pool.copy(), tails.clone()
    single, single_tails = pool.copy(), tails.clone()
    for step in range(steps):
        x = torch.stack([x[length + step] for length, x in zip(lengths, sequences, strict=True)])
        positions = torch.tensor([length + step for length in lengths], dtype=torch.int32)
        got = native.gdn_decode(
            x, params, pool.storage, pool.table, slots, tails, positions, out=nan(3, params.heads * dim)
        )
        want = reference.gdn_decode(x, params, other.storage, pool.table, slots, other_tails, positions)
        assert (got - want).abs().max() < bound(dtype, window)
        for i in range(3):
            alone = native.gdn_decode(
                x[i : i + 1], params, single.storage, pool.table, slots[i : i + 1], single_tails, positions[i : i + 1]
            )
            assert torch.equal(alone[0], got[i]), "a row's bits depend on its company"
    assert pool.same_bytes(single)
    used = slots.long()
    assert torch.equal(tails[used], other_tails[used])
    assert tails[1].isnan().all(), "another request's tail was touched"
    for row, (slot, x) in enumerate(zip(slots.tolist(), sequences, strict=True)):
        fresh, fresh_tails = make(params, dtype)
        whole = native.gdn_prefill(x, params, fresh.storage, fresh.table[0], fresh_tails[0], False, 0)
        assert torch.equal(fresh_tails[0], tails[slot])
        assert (whole[-1] - got[row]).abs().max() < 5e-5, "decode drifted away from prefill"


def test_threads_do_not_change_bits() -> None:
    params = ssm_params(6, 2, 64, "q", window=16)
    x = inputs(params, 150)
    results = []
    pool, tails = make(params, torch.bfloat16)
    for threads in (1, 2, 5):
        mine = pool.copy()
        kernels = native_kernels(torch.bfloat16, 2, threads)
        results.append(kernels.gdn_prefill(x, params, mine.storage, pool.table[0], tails[0].clone(), False, 0))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 10])
def test_other_conv_widths(width: int) -> None:
    params = ssm_params(4, 2, 32, "q", window=0, width=width)
    native, reference = both(torch.float32, 2)
    x = inputs(params, 50)
    pool, tails = make(params, torch.float32)
    other, other_tails = pool.copy(), tails.clone()
    position = torch.tensor([40], dtype=torch.int32)
    slot = torch.zeros(1, dtype=torch.int32)
    results = []
    for kernels, memory, tail in ((native, pool, tails), (reference, other, other_tails)):
        first = kernels.gdn_prefill(x[:40], params, memory.storage, pool.table[0], tail[0], False, 0)
        then = kernels.gdn_decode(x[40:41], params, memory.storage, pool.table, slot, tail, position)
        results.append(torch.cat([first, then]))
    assert (results[0] - results[1]).abs().max() < 2e-5
    assert torch.equal(tails, other_tails)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_head_dims_take_the_reference(dtype: torch.dtype) -> None:
    params = ssm_params(2, 1, 16, "q", window=0)
    native, reference = both(dtype, 1)
    x = inputs(params, 20)
    pool, tails = make(params, dtype)
    other = pool.copy()
    got = native.gdn_prefill(x, params, pool.storage, pool.table[0], tails[0].clone(), False, 0)
    assert torch.equal(got, reference.gdn_prefill(x, params, other.storage, pool.table[0], tails[0], False, 0))
