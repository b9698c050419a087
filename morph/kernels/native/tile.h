// The inner product of everything: C[R x 32] = A[R x k] B[k x 32] (+ sum[R x 32]) in float32 registers.
//
// Every output element is one chain of fused multiply-adds over k in order, whatever R is and however k is cut into
// calls, so a row's result does not depend on the rows beside it.
#pragma once

#include "simd.h"

namespace morph {

#ifdef MORPH_AVX512
constexpr int TILE_ROWS = 12;  // 24 accumulators, 2 registers of B, 1 of A
#else
constexpr int TILE_ROWS = 3;
#endif
constexpr int TILE_COLS = 32;

// How A lies: element (r, i) at a[r * stride + i], or at a[i * stride + r].
enum class A { rows, columns };

// What to fetch while a tile runs: a row of B at `at`, which moves by `step` bytes with every row of the tile.
struct Ahead {
    const char* at = nullptr;
    long step = 0;
};

// What B is: k rows of 32 floats or 32 bf16, `b_stride` bytes apart. Of bf16, accumulator 0 takes the even elements
// and accumulator 1 the odd ones; weights are packed so that these are columns 0-15 and 16-31.
template <int R, A LAYOUT, typename B, bool ADD, bool STREAM = false>
__attribute__((noinline)) void tile(
    const float* MORPH_RESTRICT a, long a_stride, const void* MORPH_RESTRICT b_data, long b_stride, long k,
    const float* sum, long sum_stride, float* c, long c_stride, Ahead ahead = {}) {
    const char* b = static_cast<const char*>(b_data);
    vf acc[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        acc[r][0] = ADD ? load(sum + r * sum_stride) : vf{};
        acc[r][1] = ADD ? load(sum + r * sum_stride + LANES) : vf{};
    }
    for (long i = 0; i < k; i++) {
        vf b0, b1;
        if constexpr (sizeof(B) == 2) {
            vu pairs = load_pairs(b);
            b0 = even_of(pairs);
            b1 = odd_of(pairs);
        } else {
            b0 = load(reinterpret_cast<const float*>(b));
            b1 = load(reinterpret_cast<const float*>(b) + LANES);
        }
        b += b_stride;
        if constexpr (STREAM) {
            for (long line = 0; line < static_cast<long>(TILE_COLS * sizeof(B)); line += 64)
                __builtin_prefetch(ahead.at + line);
            ahead.at += ahead.step;
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            float s = LAYOUT == A::rows ? a[r * a_stride + i] : a[r];
            acc[r][0] += s * b0;
            acc[r][1] += s * b1;
        }
        if (LAYOUT == A::columns) a += a_stride;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        store(c + r * c_stride, acc[r][0]);
        store(c + r * c_stride + LANES, acc[r][1]);
    }
}

template <A LAYOUT, typename B, bool ADD, bool STREAM = false>
MORPH_INLINE void tile_of(
    int rows, const float* a, long a_stride, const void* b, long b_stride, long k, const float* sum, long sum_stride,
    float* c, long c_stride, Ahead ahead = {}) {
#define MORPH_CASE(R)                                                                                       \
    case R:                                                                                                 \
        tile<R, LAYOUT, B, ADD, STREAM>(a, a_stride, b, b_stride, k, sum, sum_stride, c, c_stride, ahead); \
        break;
    switch (rows) {
        MORPH_CASE(1)
        MORPH_CASE(2)
        MORPH_CASE(3)
#ifdef MORPH_AVX512
        MORPH_CASE(4)
        MORPH_CASE(5)
        MORPH_CASE(6)
        MORPH_CASE(7)
        MORPH_CASE(8)
        MORPH_CASE(9)
        MORPH_CASE(10)
        MORPH_CASE(11)
        MORPH_CASE(12)
#endif
    }
#undef MORPH_CASE
}

// C = A B, or C += A B, with C in one place.
template <A LAYOUT, typename B, bool ADD>
MORPH_INLINE void tile_of(
    int rows, const float* a, long a_stride, const void* b, long b_stride, long k, float* c, long c_stride) {
    tile_of<LAYOUT, B, ADD>(rows, a, a_stride, b, b_stride, k, c, c_stride, c, c_stride);
}

// Calls f(first, rows) for `total` rows cut into tiles of nearly equal height.
template <typename F>
MORPH_INLINE void for_row_tiles(long total, F f) {
    long tiles = ceil_div(total, TILE_ROWS);
    long first = 0;
    for (long t = 0; t < tiles; t++) {
        long next = total * (t + 1) / tiles;
        f(first, static_cast<int>(next - first));
        first = next;
    }
}

}  // namespace morph
