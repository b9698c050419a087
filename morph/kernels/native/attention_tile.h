// One step of flash attention: a tile of rows meets 64 keys in float32.
#pragma once

#include <algorithm>

#include "attention.h"
#include "tile.h"

namespace morph {

constexpr long KEYS = 64;
constexpr float NONE = -__builtin_inff();

// 16 keys x 32 dims of bf16, or 16 x 16 of float32, to columns of the [dim][32] panels.
template <typename B>
void transpose_keys(const Pages& pages, long first, long count, float* MORPH_RESTRICT to) {
    constexpr long WIDE = 64 / sizeof(B);  // dims in one register
    for (long t = 0; t < KEYS; t += LANES) {
        const char* keys[LANES];
        for (long i = 0; i < LANES; i++) keys[i] = t + i < count ? pages.key(first + t + i) : nullptr;
        float* panel = to + t / TILE_COLS * pages.dim * TILE_COLS + t % TILE_COLS;
        for (long d = 0; d < pages.dim; d += WIDE) {
            vu x[LANES];
#pragma GCC unroll 16
            for (long i = 0; i < LANES; i++) x[i] = keys[i] ? load_pairs(keys[i] + d * sizeof(B)) : vu{};
            transpose16(x);
            for (long i = 0; i < LANES; i++) {
                if constexpr (sizeof(B) == 2) {
                    store(panel + (d + 2 * i) * TILE_COLS, even_of(x[i]));
                    store(panel + (d + 2 * i + 1) * TILE_COLS, odd_of(x[i]));
                } else {
                    store(panel + (d + i) * TILE_COLS, (vf)x[i]);
                }
            }
        }
    }
}

struct RowState {
    float max;
    vf sum;  // one partial sum per lane
};

// Scores [rows][64] in base 2 to weights, in place; rescales the rows' outputs where the maximum grew.
// Row r attends to keys [from[r], to[r]) of the tile; `masked` = some row does not attend to all.
template <bool MASKED>
MORPH_INLINE void soften(
    float* scores, int rows, const long* from, const long* to, RowState* state, float* out, long dim) {
    constexpr int V = KEYS / LANES;
    float base[TILE_ROWS];
    for (int r = 0; r < rows; r++) {
        vf x[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) x[i] = load(scores + r * KEYS + i * LANES);
        if (MASKED) {
            const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
            for (int i = 0; i < V; i++) {
                vi at = lane + i * LANES;
                x[i] = select((at >= (int)from[r]) & (at < (int)to[r]), x[i], splat(NONE));
                store(scores + r * KEYS + i * LANES, x[i]);
            }
        }
        float top = max_of(max(max(x[0], x[1]), max(x[2], x[3])));
        RowState& s = state[r];
        if (top > s.max) {
            vf shrink = exp2(splat(s.max - top));
            s.max = top;
            s.sum *= shrink;
            for (long d = 0; d < dim; d += LANES) store(out + r * dim + d, load(out + r * dim + d) * shrink);
        }
        // A row that has seen no key yet keeps weights of zero.
        base[r] = s.max == NONE ? 0.0f : s.max;
    }
    // Apart from the maxima, so that rows do not wait for each other.
    for (int r = 0; r < rows; r++) {
        vf x[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) {
            x[i] = exp2(load(scores + r * KEYS + i * LANES) - base[r]);
            store(scores + r * KEYS + i * LANES, x[i]);
        }
        state[r].sum += (x[0] + x[1]) + (x[2] + x[3]);
    }
}

// Rows [0, tall) of a tile against `seen` keys from `tile_at` on, which lie transposed in `keys`; q is scaled to base 2.
// Row r attends to keys [from[r], to[r]) of the tile where `masked`, else to all.
template <typename B>
MORPH_INLINE void attend_tile(
    const Pages& pages, const float* q, const float* keys, long tile_at, long seen, int tall, bool masked,
    const long* from, const long* to, float* scores, RowState* state, float* out) {
    const long dim = pages.dim;
    for (long half = 0; half * TILE_COLS < seen; half++)
        tile_of<A::rows, float, false>(tall, q, dim, keys + half * dim * TILE_COLS, TILE_COLS * sizeof(float), dim,
                                       scores + half * TILE_COLS, KEYS);
    if (masked)
        soften<true>(scores, tall, from, to, state, out, dim);
    else
        soften<false>(scores, tall, nullptr, nullptr, state, out, dim);
    // Not past `seen`: the weights there are zero, and what lies there may be no value at all.
    for (long t = 0; t < seen;) {
        long run = std::min(pages.run(tile_at + t), seen - t);
        const char* values = pages.value(tile_at + t);
        for (long d = 0; d < dim; d += TILE_COLS)
            tile_of<A::rows, B, true>(tall, scores + t, KEYS, values + d * sizeof(B), dim * sizeof(B), run, out + d, dim);
        t += run;
    }
}

// A finished row of outputs, divided by its sum of weights.
template <typename B>
MORPH_INLINE void finish_row(const float* from, float share, long dim, float* to) {
    for (long d = 0; d < dim; d += TILE_COLS)
        for (int i = 0; i < LANES; i++) {
            // bf16 values were taken apart into even and odd columns.
            long even = sizeof(B) == 2 ? 2 * i : i, odd = sizeof(B) == 2 ? 2 * i + 1 : i + LANES;
            to[d + even] = from[d + i] * share;
            to[d + odd] = from[d + LANES + i] * share;
        }
}

}  // namespace morph
