// Gated DeltaNet (Yang et al., 2024): parameters and the parts that prefill and decode share.
#pragma once

#include "simd.h"

namespace morph {

// Mirrors `GdnParams` in native.py.
struct GdnParams {
    const float* conv;     // [width][qkv], taps first, the last one meets the current token
    const float* ab_bias;  // [2 * state_heads]
    const float* gain;     // [heads]
    const float* mix;      // [heads] or null: logit of the window's share
    const float* cos;      // [max_context][dim / 2]
    const float* sin;
    int64_t heads, kv_heads, state_heads, dim, width, window;

    long qkv() const { return (heads + 2 * kv_heads) * dim; }
    long group() const { return heads / kv_heads; }
    long kv_head_of(long state) const { return state_heads == heads ? state / group() : state; }
    long queries() const { return heads / state_heads; }  // query heads that read one state
};

constexpr float NORM_EPS = 1e-6f;

// One head after the conv: y[dim] = sum over taps of rows[tap][dim] * conv[tap][dim].
MORPH_INLINE void conv_head(
    const float* const* rows, const float* conv, long conv_stride, long width, long dim, float* y) {
    for (long d = 0; d < dim; d += LANES) {
        vf total = load(rows[0] + d) * load(conv + d);
        for (long tap = 1; tap < width; tap++) total += load(rows[tap] + d) * load(conv + tap * conv_stride + d);
        store(y + d, total);
    }
}

MORPH_INLINE void l2_normalise(float* x, long dim) {
    vf total = vf{};
    for (long d = 0; d < dim; d += LANES) {
        vf v = load(x + d);
        total += v * v;
    }
    float scale = 1.0f / std::sqrt(sum(total) + NORM_EPS);
    for (long d = 0; d < dim; d += LANES) store(x + d, load(x + d) * scale);
}

// The memory of one block's mixer for one request or a batch.
struct GdnMemory {
    char* storage;
    int64_t unit_bytes;
    const int32_t* table;  // row of slot s at table + s * table_stride: state units, then ring units [kv_heads][pages]
    long table_stride;
    long page_tokens;
    int is_bf16;  // of ring pages

    float* state(long slot, long head) const {
        return reinterpret_cast<float*>(storage + table[slot * table_stride + head] * unit_bytes);
    }
};

// Window attention of rows start…start + rows - 1 of one sequence into out[rows][heads * dim], and the ring's update.
// `known` of the tokens before are in the ring.
void window_prefill(
    const GdnParams& p, const GdnMemory& memory, const float* x, long x_stride, long rows, long start, long known,
    float* out, int threads);

// The same for one token of each of `rows` requests.
void window_decode(
    const GdnParams& p, const GdnMemory& memory, const float* x, long x_stride, long rows, const int32_t* slots,
    const int32_t* positions, float* out, int threads);

}  // namespace morph
