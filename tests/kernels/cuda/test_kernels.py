"""Each Triton kernel against the torch reference; what it has no business reading is NaN."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cuda.device import DEVICE, close, on_device, pair, params_on_device
from tests.kernels.memory import DTYPES, Pool, nan, rope_tables, ssm_params

from morph.kernels.cuda.row_linear import Tile, row_linear  # isort: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 576])
def test_norm_adds_normalises_and_sums(d: int, dtype: torch.dtype) -> None:
    from morph.kernels.cuda.norm import add_rms_norm

    _, reference = pair(dtype, 1)
    h, delta, weight = torch.randn(5, d), torch.randn(5, d).to(dtype), torch.randn(d)
    sums = torch.randn(4, 2, d, dtype=torch.float64)
    slots = torch.tensor([2, -1, 0, 3, -1], dtype=torch.int32)
    want_h = h.clone()
    want = reference.add_rms_norm_(want_h, delta.float(), weight, 1e-5)
    got_h, got_sums = h.to(DEVICE, copy=True), sums.to(DEVICE, copy=True)
    out = torch.full((5, d), float("nan"), dtype=dtype, device=DEVICE)
    add_rms_norm(
        got_h,
        delta.to(DEVICE, copy=True),
        weight.to(DEVICE, copy=True),
        1e-5,
        out,
        got_sums[:, 1],
        slots.to(DEVICE, copy=True),
    )
    close(got_h, want_h, torch.float32)
    close(out, want, dtype)
    expected = sums.clone()
    for row, slot in ((0, 2), (2, 0), (3, 3)):
        expected[slot, 1] += out[row].double().cpu()
    assert torch.equal(got_sums.cpu(), expected), "a sum, another block's or a padding row's, is wrong"


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    kernels, reference = pair(dtype, 1)
    x = torch.randn(7, 2 * 96).to(dtype)
    close(kernels.silu_mul(x.to(DEVICE, copy=True)), reference.silu_mul(x.float()), dtype)
    o = torch.randn(7, 96).to(dtype)
    close(
        kernels.gate_silu_mul_(o.to(DEVICE, copy=True), x[:, :96].to(DEVICE, copy=True)),
        reference.gate_silu_mul_(o.clone().float(), x[:, :96].float()),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(96, 64), (50, 40), (160, 256)])
@pytest.mark.parametrize("live", [0, 1, 5, 20])
def test_row_linear_touches_live_rows_only(live: int, n: int, k: int, dtype: torch.dtype) -> None:
    capacity = 20
    x, w = torch.randn(capacity, k).to(dtype), torch.randn(n, k).to(dtype)
    bias, mul = torch.randn(n), torch.randn(capacity, n).to(dtype)
    rows = torch.randperm(capacity).int()
    x[rows[live:].long()] = float("nan")
    count = torch.tensor([live], dtype=torch.int32, device=DEVICE)
    picked = rows[:live].long()
    want = x[picked].float() @ w.float().T
    device = [t.to(DEVICE, copy=True) for t in (x, w, rows)]
    tile = Tile(16, 32, 32, 4, 2)
    blank = torch.full((capacity, n), float("nan"), dtype=dtype, device=DEVICE)
    out = blank.clone()
    row_linear(device[0], device[1], out, count, device[2], gather=True, tile=tile)
    assert out[live:].isnan().all()
    if live:
        close(out[:live], want, dtype)
    compact = x[rows.long()].to(DEVICE, copy=True)
    out = blank.clone()
    row_linear(compact, device[1], out, count, device[2], scatter=True, tile=tile)
    dead = torch.ones(capacity, dtype=torch.bool)
    dead[picked] = False
    assert out.cpu()[dead].isnan().all()
    if live:
        close(out.cpu()[picked], want, dtype)
    out = mul.to(DEVICE, copy=True)
    row_linear(compact, device[1], out, count, bias=bias.to(DEVICE, copy=True), silu_mul=out, tile=tile)
    assert torch.equal(out[live:].cpu(), mul[live:])
    if live:
        close(out[:live], torch.nn.functional.silu(want + bias) * mul[:live].float(), dtype)


def test_row_linear_without_rows_reads_no_weight() -> None:
    w = torch.full((64, 64), float("nan"), device=DEVICE)
    out = torch.zeros(16, 64, device=DEVICE)
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    row_linear(torch.zeros(16, 64, device=DEVICE), w, out, count)
    assert not out.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_writes_keys_and_values(normed: bool, dtype: torch.dtype) -> None:
    dim, heads, kv_heads, max_pages = 32, 6, 2, 8
    kernels, reference = pair(dtype, kv_heads)
    pool = Pool.make(3, kv_heads * max_pages, dim, dtype)
    mine = on_device(pool)
    cos, sin = rope_tables(256, dim)
    qkv = torch.randn(20, (heads + 2 * kv_heads) * dim).to(dtype)
    positions = torch.tensor([*range(17), 5, 63, 100], dtype=torch.int32)
    slots = torch.tensor([1] * 17 + [0, 2, 2], dtype=torch.int32)
    gains = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if normed else (None, None)
    want, got = qkv.clone().float(), qkv.to(DEVICE, copy=True)
    reference.rope_write_kv_(want, cos, sin, positions, *gains, 1e-5, pool.storage, pool.table, slots, max_pages)
    moved = [None if t is None else t.to(DEVICE, copy=True) for t in gains]
    kernels.rope_write_kv_(
        got, cos.to(DEVICE), sin.to(DEVICE), positions.to(DEVICE), *moved, 1e-5, mine.storage, mine.table,
        slots.to(DEVICE, copy=True), max_pages,
    )  # fmt: skip
    close(got, want, dtype)
    ours, theirs = (p.storage.cpu().view(dtype).float() for p in (mine, pool))
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.allclose(ours.nan_to_num(), theirs.nan_to_num(), atol=1e-5, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 32), (4, 4, 64), (9, 3, 64)])
def test_paged_attention(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    kernels, reference = pair(dtype, kv_heads)
    tokens = 2 * dim + 37
    max_pages = -(-tokens // (2 * dim // dtype.itemsize)) + 1
    pool = Pool.make(1, kv_heads * max_pages, dim, dtype)
    pool.fill_kv(0, kv_heads, max_pages, tokens)
    mine = on_device(pool)
    q = torch.randn(tokens, heads * dim).to(dtype)
    want = reference.prefill_attention(q.float(), pool.storage, pool.table[0], max_pages, 0, dim**-0.5)
    for start in (0, 1, 40, tokens - 1):
        got = kernels.prefill_attention(
            q[start:].to(DEVICE, copy=True), mine.storage, mine.table[0], max_pages, start, dim**-0.5,
            out=torch.full((tokens - start, heads * dim), float("nan"), dtype=dtype, device=DEVICE),
        )  # fmt: skip
        close(got, want[start:], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 32), (4, 4, 64), (9, 3, 64)])
def test_decode_attention_over_splits(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    kernels, reference = pair(dtype, kv_heads)
    lens = torch.tensor([1, 17, 130, 300], dtype=torch.int32)
    slots = torch.tensor([3, 0, 1, 2], dtype=torch.int32)
    max_pages = -(-304 // (2 * dim // dtype.itemsize))
    pool = Pool.make(4, kv_heads * max_pages, dim, dtype)
    for slot, length in zip(slots.tolist(), lens.tolist(), strict=True):
        pool.fill_kv(slot, kv_heads, max_pages, length)
    mine = on_device(pool)
    q = torch.randn(4, heads * dim).to(dtype)
    want = reference.decode_attention(q.float(), pool.storage, pool.table, max_pages, slots, lens, dim**-0.5)
    got = kernels.decode_attention(
        q.to(DEVICE, copy=True),
        mine.storage,
        mine.table,
        max_pages,
        slots.to(DEVICE, copy=True),
        lens.to(DEVICE, copy=True),
        dim**-0.5,
    )
    close(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_heads", ["q", "kv"])
@pytest.mark.parametrize("window", [0, 7, 64])
def test_gated_delta_prefill_then_decode(window: int, state_heads: str, dtype: torch.dtype) -> None:
    heads, kv_heads, dim = 4, 2, 32
    params = ssm_params(heads, kv_heads, dim, state_heads, window)
    on = params_on_device(params)
    kernels, reference = pair(dtype, kv_heads)
    per_page = 2 * dim // dtype.itemsize
    pool = Pool.make(3, params.state_heads + kv_heads * -(-window // per_page), dim, dtype)
    mine = on_device(pool)
    tails = nan(3, 2, 3, params.qkv_size)
    my_tails = tails.to(DEVICE, copy=True)[:, 1]
    tails = tails[:, 1]
    columns = params.qkv_size + 2 * params.state_heads
    lengths, steps, slots = [1, 70], 4, [2, 0]
    sequences = [torch.randn(n + steps, columns + 8).to(dtype) for n in lengths]
    for x in sequences:
        x[:, columns:] = float("nan")
    for slot, n, x in zip(slots, lengths, sequences, strict=True):
        for begin, end in ((0, n // 2), (n // 2, n)):
            if begin == end:
                continue
            want = reference.gdn_prefill(
                x[begin:end].float(), params, pool.storage, pool.table[slot], tails[slot], begin > 0, begin
            )
            got = kernels.gdn_prefill(
                x[begin:end].to(DEVICE, copy=True), on, mine.storage, mine.table[slot], my_tails[slot], begin > 0, begin
            )
            close(got, want, dtype)
    index = torch.tensor(slots, dtype=torch.int32)
    for step in range(steps):
        x = torch.stack([s[n + step] for s, n in zip(sequences, lengths, strict=True)])
        positions = torch.tensor([n + step for n in lengths], dtype=torch.int32)
        want = reference.gdn_decode(x.float(), params, pool.storage, pool.table, index, tails, positions)
        got = kernels.gdn_decode(
            x.to(DEVICE, copy=True),
            on,
            mine.storage,
            mine.table,
            index.to(DEVICE, copy=True),
            my_tails,
            positions.to(DEVICE, copy=True),
        )
        close(got, want, dtype)
    assert torch.equal(my_tails[index.long()].cpu(), tails[index.long()]), "conv tails differ"
    assert my_tails[1].isnan().all(), "another request's tail was touched"
    for slot in slots:
        units = pool.table[slot, : params.state_heads].long()
        close(mine.storage.cpu()[units].view(torch.float32), pool.storage[units].view(torch.float32), dtype)
    rest = torch.ones(pool.storage.shape[0], dtype=torch.bool)
    rest[pool.table[slots, : params.state_heads].flatten().long()] = False
    ours, theirs = (p.storage.cpu()[rest].view(dtype).float() for p in (mine, pool))
    assert torch.equal(ours.isnan(), theirs.isnan()), "other units were written"
    assert torch.allclose(ours.nan_to_num(), theirs.nan_to_num(), atol=1e-5, rtol=1e-2), "rings differ"


def test_offsets_beyond_two_to_the_31_elements() -> None:
    dim, kv_heads, tokens = 64, 1, 40
    kernels, reference = pair(torch.bfloat16, kv_heads)
    units = 2**31 // (dim * dim * 2) + 8
    # Reserved but never touched where the system maps memory lazily: 4 GiB of which three units are used.
    storage = torch.empty(units, dim * dim * 4, dtype=torch.uint8, device=DEVICE)
    small = Pool.make(1, 3, dim, torch.bfloat16)
    table = torch.tensor([[units - 1, units - 2, units - 3]], dtype=torch.int32)
    cos, sin = rope_tables(64, dim)
    qkv = torch.randn(tokens, 4 * dim).to(torch.bfloat16)
    positions, slots = torch.arange(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    want, got = qkv.clone().float(), qkv.to(DEVICE, copy=True)
    reference.rope_write_kv_(want, cos, sin, positions, None, None, 0, small.storage, small.table, slots, 1)
    kernels.rope_write_kv_(
        got, cos.to(DEVICE), sin.to(DEVICE), positions.to(DEVICE), None, None, 0.0, storage, table.to(DEVICE),
        slots.to(DEVICE), 1,
    )  # fmt: skip
    last = torch.tensor([tokens], dtype=torch.int32)
    expected = reference.decode_attention(
        want[-1:, : 2 * dim], small.storage, small.table, 1, slots[:1], last, dim**-0.5
    )
    o = kernels.decode_attention(
        got[-1:, : 2 * dim], storage, table.to(DEVICE), 1, slots[:1].to(DEVICE), last.to(DEVICE), dim**-0.5
    )
    close(o, expected, torch.bfloat16)
    whole = kernels.prefill_attention(got[:, : 2 * dim], storage, table[0].to(DEVICE), 1, 0, dim**-0.5)
    close(whole[-1:], expected, torch.bfloat16)
    params = ssm_params(2, 1, dim, "q", 0)
    x = torch.randn(30, params.qkv_size + 4).to(torch.bfloat16)
    tails = nan(1, 3, params.qkv_size)
    my_tails = tails.to(DEVICE, copy=True)
    on = params_on_device(params)
    reference.gdn_prefill(x[:29].float(), params, small.storage, small.table[0], tails[0], False, 0)
    kernels.gdn_prefill(x[:29].to(DEVICE), on, storage, table[0].to(DEVICE), my_tails[0], False, 0)
    at = torch.tensor([29], dtype=torch.int32)
    expected = reference.gdn_decode(x[29:].float(), params, small.storage, small.table, slots[:1], tails, at)
    got = kernels.gdn_decode(
        x[29:].to(DEVICE), on, storage, table.to(DEVICE), slots[:1].to(DEVICE), my_tails, at.to(DEVICE)
    )
    close(got, expected, torch.bfloat16)
