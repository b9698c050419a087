// Block fixed point: float32 sums of products of 16-bit integers, exact inside a block.
//
// Cores with VNNI multiply pairs of 16-bit integers at twice the rate of float32. Of both operands a block of `k` values is
// divided by its own largest magnitude and rounded to an integer; the products of one block add up exactly in 32 bits,
// and the sums of blocks are scaled and added in float32, in order. Memory keeps bf16: integers live for one call. The
// rounding is finer than that of bf16 operands: 14 bits of activations and 12 of weights, counted from the block's
// largest value. A row has scales of its own, so its result does not depend on the rows beside it.
#pragma once

#include "simd.h"

#if defined(MORPH_AVX512) && defined(__AVX512VNNI__)
#define MORPH_FIXED 1

namespace morph {

constexpr long FIXED_BLOCK = 192;         // values of k that share a scale
constexpr float FIXED_ACTIVATION = 4095;  // FIXED_BLOCK products of the largest integers stay below 2^31
constexpr float FIXED_WEIGHT = 2730;
static_assert(FIXED_BLOCK * FIXED_ACTIVATION * FIXED_WEIGHT < 2147483648.0, "a block may not overflow");

MORPH_INLINE vi dot_pairs(vi sum, vi a, vi b) {
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}

// One pair of 16-bit integers to all lanes.
MORPH_INLINE vi splat_pair(const int16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return (vi)_mm512_set1_epi32(pair);
}

// To the nearest integer.
MORPH_INLINE vi to_int(vf x) { return (vi)_mm512_cvtps_epi32((__m512)x); }
MORPH_INLINE vf from_int(vi x) { return (vf)_mm512_cvtepi32_ps((__m512i)x); }

// 16 integers as 16-bit ones; they fit.
MORPH_INLINE void store16(int16_t* p, vi x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)x));
}

// Largest magnitude, a NaN above all: it must not get lost, since no integer stands for it.
MORPH_INLINE vi grow(vi top, vf x) { return (vi)_mm512_max_epi32((__m512i)top, (__m512i)abs(x)); }

// The factor to integers of at most `most`, for the magnitude `top`; 0 where that is nothing, infinite or NaN.
constexpr float FIXED_LEAST = 1e-30f;
MORPH_INLINE vf inverse_of(vf top, float most) {
    return (vf)_mm512_maskz_div_ps(_mm512_cmp_ps_mask((__m512)top, (__m512)splat(FIXED_LEAST), _CMP_GT_OQ),
                                   (__m512)splat(most), (__m512)top);
}

// Lanes of `low` in the low halves, of `high` in the high halves.
MORPH_INLINE vi pair_of(vi low, vi high) { return (low & 0xffff) | (high << 16); }

}  // namespace morph
#endif
