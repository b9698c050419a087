"""One tile of keys into a running softmax (Milakov & Gimelshein, 2018), shared by prefill and decode attention."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold(scores, v, best, total, acc, IEEE: tl.constexpr):
    """Running maximum, sum and weighted values after a tile, base 2.

    Args:
        scores: `[queries, keys]`, already scaled by log2(e); -inf where a query does not see a key.
        v: `[keys, d]`. best: `[queries]`, finite from the start, so that a query that has seen no key weighs all by 0.
        total: `[queries]`. acc: `[queries, d]`.
    """
    now = tl.maximum(best, tl.max(scores, axis=1))
    weight = tl.exp2(scores - now[:, None])
    shrink = tl.exp2(best - now)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee" if IEEE else "tf32")
    return now, total, acc
