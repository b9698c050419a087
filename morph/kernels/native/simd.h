// Vectors of 16 floats through GCC/Clang vector extensions: one AVX-512 register, two AVX2 or four NEON ones.
// Functions that need more than arithmetic have an AVX-512 version and a portable one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MORPH_AVX512 1
#include <immintrin.h>
#endif

#define MORPH_API extern "C" __attribute__((visibility("default")))
#define MORPH_INLINE inline __attribute__((always_inline))
#define MORPH_RESTRICT __restrict__

namespace morph {

constexpr int LANES = 16;

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef double vd __attribute__((vector_size(128)));
typedef uint16_t vh __attribute__((vector_size(32)));
// Loads and stores that need not be aligned.
typedef float vf_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(32), aligned(2), may_alias));
typedef double vd_any __attribute__((vector_size(128), aligned(8), may_alias));

struct bf16 {
    uint16_t bits;
};

MORPH_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
MORPH_INLINE void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }
MORPH_INLINE vf splat(float x) { return vf{} + x; }

// 32 bf16 in one register: even elements are the low halves of 32-bit lanes, odd elements the high halves.
MORPH_INLINE vu load_pairs(const void* p) { return *reinterpret_cast<const vu_any*>(p); }
MORPH_INLINE vf even_of(vu pairs) { return (vf)(pairs << 16); }
MORPH_INLINE vf odd_of(vu pairs) { return (vf)(pairs & 0xffff0000u); }

MORPH_INLINE vf load(const bf16* p) {
    vh x = *reinterpret_cast<const vh_any*>(p);
    return (vf)(__builtin_convertvector(x, vu) << 16);
}

// Round to nearest even, as torch does; NaN stays NaN.
MORPH_INLINE void store(bf16* p, vf x) {
    vu u = (vu)x;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu nan = (vu)(x != x);
    rounded = (rounded & ~nan) | (nan & 0x7fc0u);
    *reinterpret_cast<vh_any*>(p) = __builtin_convertvector(rounded, vh);
}

MORPH_INLINE float to_float(float x) { return x; }
MORPH_INLINE float to_float(bf16 x) {
    uint32_t u = static_cast<uint32_t>(x.bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

MORPH_INLINE vf select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
#ifdef MORPH_AVX512
MORPH_INLINE vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#else
MORPH_INLINE vf max(vf a, vf b) { return select(a > b, a, b); }
#endif

// Halves are added until one lane is left, in the same order in every build.
#ifdef MORPH_AVX512
MORPH_INLINE float sum(vf x) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
#else
MORPH_INLINE float sum(vf x) {
    float part[8];
    for (int i = 0; i < 8; i++) part[i] = x[i] + x[i + 8];
    for (int i = 0; i < 4; i++) part[i] += part[i + 4];
    return (part[0] + part[2]) + (part[1] + part[3]);
}
#endif
#ifdef MORPH_AVX512
MORPH_INLINE float max_of(vf x) { return _mm512_reduce_max_ps((__m512)x); }
#else
MORPH_INLINE float max_of(vf x) {
    float m = x[0];
    for (int i = 1; i < LANES; i++) m = x[i] > m ? x[i] : m;
    return m;
}
#endif

// 2^x, relative error below 2e-7; 0 for x < -126 and for -inf, x must be below 128.
// A minimax polynomial of degree 6 for 2^r, r in [-1/2, 1/2].
MORPH_INLINE vf exp2_poly(vf r) {
    vf p = splat(1.5403530393381610e-4f);
    p = p * r + 1.3333558146428443e-3f;
    p = p * r + 9.6181291076284772e-3f;
    p = p * r + 5.5504108664821580e-2f;
    p = p * r + 2.4022650695910072e-1f;
    p = p * r + 6.9314718055994531e-1f;
    return p * r + 1.0f;
}

#ifdef MORPH_AVX512
MORPH_INLINE vf exp2(vf x) {
    __m512 v = (__m512)x;
    // 8: to the nearest integer, no exceptions. The rest of -inf is 0.
    __m512 r = _mm512_reduce_ps(v, 8);
    __m512 n = _mm512_sub_ps(v, r);
    __m512 y = _mm512_scalef_ps((__m512)exp2_poly((vf)r), n);
    // Denormal results are flushed so that all builds agree on what underflows.
    return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), y);
}
#else
MORPH_INLINE vf exp2(vf x) {
    vi tiny = x < -126.0f;
    vf safe = select(tiny, splat(0.0f), x);
    vf n = (safe + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
    vf y = exp2_poly(safe - n);
    vi scale = (__builtin_convertvector(n, vi) + 127) << 23;
    return select(tiny, splat(0.0f), y * (vf)scale);
}
#endif

constexpr float LOG2E = 1.4426950408889634f;

MORPH_INLINE vf exp(vf x) { return exp2(x * LOG2E); }
MORPH_INLINE vf sigmoid(vf x) {
    // exp of a negative number only: no overflow.
    vf e = exp(select(x > 0.0f, -x, x));
    vf d = 1.0f / (1.0f + e);
    return select(x > 0.0f, d, e * d);
}
MORPH_INLINE vf silu(vf x) { return x * sigmoid(x); }

MORPH_INLINE vf abs(vf x) { return (vf)((vu)x & 0x7fffffffu); }

// log(sigmoid(x)) = min(x, 0) - log(1 + y), y = e^-|x|, and log(1 + y) = 2 atanh(y / (2 + y)).
MORPH_INLINE vf log_sigmoid(vf x) {
    vf y = exp(-abs(x));
    vf s = y / (y + 2.0f), t = s * s;
    vf p = splat(1.0f / 15);
    p = p * t + 1.0f / 13;
    p = p * t + 1.0f / 11;
    p = p * t + 1.0f / 9;
    p = p * t + 1.0f / 7;
    p = p * t + 1.0f / 5;
    p = p * t + 1.0f / 3;
    p = p * t + 1.0f;
    return select(x < 0.0f, x, splat(0.0f)) - 2.0f * s * p;
}

MORPH_INLINE float sigmoid1(float x) { return sigmoid(splat(x))[0]; }
MORPH_INLINE float log_sigmoid1(float x) { return log_sigmoid(splat(x))[0]; }
MORPH_INLINE float exp1(float x) { return exp(splat(x))[0]; }

#if defined(__clang__)
#define MORPH_SHUFFLE(p, q, ...) __builtin_shufflevector(p, q, __VA_ARGS__)
#else
#define MORPH_SHUFFLE(p, q, ...) __builtin_shuffle(p, q, (vu){__VA_ARGS__})
#endif
// x[i], x[i + step] <- their elements with bit `step` of the lane number exchanged.
#define MORPH_EXCHANGE(step, low, high)                                     \
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) if (!(i & step)) { \
        vu p = x[i], q = x[i + step];                                       \
        x[i] = low;                                                         \
        x[i + step] = high;                                                 \
    }

// Transposes 16 vectors of 16 in place.
MORPH_INLINE void transpose16(vu* x) {
    MORPH_EXCHANGE(1, MORPH_SHUFFLE(p, q, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
                   MORPH_SHUFFLE(p, q, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
    MORPH_EXCHANGE(2, MORPH_SHUFFLE(p, q, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                   MORPH_SHUFFLE(p, q, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    MORPH_EXCHANGE(4, MORPH_SHUFFLE(p, q, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                   MORPH_SHUFFLE(p, q, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    MORPH_EXCHANGE(8, MORPH_SHUFFLE(p, q, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                   MORPH_SHUFFLE(p, q, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
}

// Sums of 16 vectors: lane i of the result is the sum over x[i]. Destroys x.
MORPH_INLINE vf sum16(vf* x) {
#define MORPH_ADD(step, ...)                                                                                   \
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 2 * step) {                                          \
        vu p = (vu)x[i], q = (vu)x[i + step];                                                                  \
        x[i] = __VA_ARGS__;                                                                                    \
    }
    MORPH_ADD(1, (vf)MORPH_SHUFFLE(p, q, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
                     (vf)MORPH_SHUFFLE(p, q, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
    MORPH_ADD(2, (vf)MORPH_SHUFFLE(p, q, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                     (vf)MORPH_SHUFFLE(p, q, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    MORPH_ADD(4, (vf)MORPH_SHUFFLE(p, q, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                     (vf)MORPH_SHUFFLE(p, q, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    MORPH_ADD(8, (vf)MORPH_SHUFFLE(p, q, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                     (vf)MORPH_SHUFFLE(p, q, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#undef MORPH_ADD
    return x[0];
}
#undef MORPH_EXCHANGE
#undef MORPH_SHUFFLE

// Memory that one thread keeps between calls; grows, never shrinks.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }
    float* floats(size_t count) { return static_cast<float*>(bytes(count * sizeof(float))); }
    void* bytes(size_t size) {
        if (size > size_) {
            std::free(data_);
            size_ = (size + 4095) / 4096 * 4096;
            data_ = std::aligned_alloc(4096, size_);
            if (!data_) {
                size_ = 0;
                throw std::bad_alloc();
            }
        }
        return data_;
    }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

MORPH_INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }

}  // namespace morph
