// Rotary embeddings (rotate-half) and QK-norm of one head, and the write of a key or value.
#pragma once

#include "simd.h"

namespace morph {

// x[dim] / sqrt(mean(x^2) + eps) * weight, in place.
MORPH_INLINE void norm_head(float* x, const float* weight, float eps, long dim) {
    vf total = vf{};
    for (long d = 0; d < dim; d += LANES) {
        vf v = load(x + d);
        total += v * v;
    }
    float scale = 1.0f / std::sqrt(sum(total) / static_cast<float>(dim) + eps);
    for (long d = 0; d < dim; d += LANES) store(x + d, load(x + d) * scale * load(weight + d));
}

// from and to may be the same head; cos and sin [dim / 2] of the token's position. dim is a multiple of 32.
MORPH_INLINE void rotate_head(const float* from, float* to, const float* cos, const float* sin, long dim) {
    long half = dim / 2;
    for (long d = 0; d < half; d += LANES) {
        vf a = load(from + d), b = load(from + half + d), c = load(cos + d), s = load(sin + d);
        store(to + d, a * c - b * s);
        store(to + half + d, b * c + a * s);
    }
}

MORPH_INLINE void write_head(const float* from, char* to, int is_bf16, long dim) {
    for (long d = 0; d < dim; d += LANES) {
        if (is_bf16)
            store(reinterpret_cast<bf16*>(to) + d, load(from + d));
        else
            store(reinterpret_cast<float*>(to) + d, load(from + d));
    }
}

}  // namespace morph
