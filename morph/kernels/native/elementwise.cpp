// Norms, activations and running sums over rows.

#include <algorithm>

#include "simd.h"

using namespace morph;

namespace {

constexpr long PARALLEL = 1 << 15;  // elements; below, waking the threads costs more than it saves

MORPH_INLINE void norm_row(const float* x, const float* weight, float eps, long d, float* out) {
    vf total[2] = {vf{}, vf{}};
    long i = 0;
    for (; i + 2 * LANES <= d; i += 2 * LANES) {
        vf a = load(x + i), b = load(x + i + LANES);
        total[0] += a * a;
        total[1] += b * b;
    }
    float rest = 0;
    for (; i < d; i++) rest += x[i] * x[i];
    const float scale = 1.0f / std::sqrt((sum(total[0] + total[1]) + rest) / static_cast<float>(d) + eps);
    for (i = 0; i + LANES <= d; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < d; i++) out[i] = x[i] * scale * weight[i];
}

MORPH_INLINE void silu_mul_row(const float* gate, const float* up, float* out, long n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, silu(load(gate + i)) * load(up + i));
    if (i == n) return;
    float g[LANES] = {}, u[LANES] = {}, y[LANES];
    std::memcpy(g, gate + i, (n - i) * sizeof(float));
    std::memcpy(u, up + i, (n - i) * sizeof(float));
    store(y, silu(load(g)) * load(u));
    std::memcpy(out + i, y, (n - i) * sizeof(float));
}

}  // namespace

// out = norm(x); rows are contiguous.
MORPH_API void morph_rms_norm(
    const float* x, const float* weight, double eps, long rows, long d, float* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * d > PARALLEL)
    for (long row = 0; row < rows; row++)
        norm_row(x + row * d, weight, static_cast<float>(eps), d, out + row * d);
}

// h += delta; out = norm(h). out may be delta.
MORPH_API void morph_add_rms_norm(
    float* h, const float* delta, const float* weight, double eps, long rows, long d, float* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * d > PARALLEL)
    for (long row = 0; row < rows; row++) {
        float* to = h + row * d;
        const float* from = delta + row * d;
        long i = 0;
        for (; i + LANES <= d; i += LANES) store(to + i, load(to + i) + load(from + i));
        for (; i < d; i++) to[i] += from[i];
        norm_row(to, weight, static_cast<float>(eps), d, out + row * d);
    }
}

// out[rows][n] = silu(x[rows][:n]) * x[rows][n:].
MORPH_API void morph_silu_mul(const float* x, long rows, long n, float* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * n > PARALLEL)
    for (long row = 0; row < rows; row++) silu_mul_row(x + row * 2 * n, x + row * 2 * n + n, out + row * n, n);
}

// o *= silu(z).
MORPH_API void morph_gate_silu_mul(float* o, const float* z, long rows, long n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * n > PARALLEL)
    for (long row = 0; row < rows; row++) silu_mul_row(z + row * n, o + row * n, o + row * n, n);
}

// acc[d] += x[rows][d] in float64: rows in tiles of 64, each summed row after row, then the tiles in order. Threads take
// rows, as the norm that wrote them does, so that they find them in their own cache.
MORPH_API void morph_sum_tokens(double* acc, const float* x, long stride, long rows, long d, int threads) {
    constexpr long TILE = 64, STEP = 64;
    static thread_local Scratch scratch;
    const long tiles = ceil_div(rows, TILE);
    double* parts = static_cast<double*>(scratch.bytes(std::max(1L, tiles) * d * sizeof(double)));
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * d > PARALLEL)
    for (long tile = 0; tile < tiles; tile++) {
        const long begin = tile * TILE, end = std::min(rows, begin + TILE);
        for (long first = 0; first < d; first += STEP) {
            const long n = std::min(STEP, d - first);
            double sums[STEP] = {};
            if (n == STEP) {
                for (long row = begin; row < end; row++)
                    for (long i = 0; i < STEP; i++) sums[i] += x[row * stride + first + i];
            } else {
                for (long row = begin; row < end; row++)
                    for (long i = 0; i < n; i++) sums[i] += x[row * stride + first + i];
            }
            std::memcpy(parts + tile * d + first, sums, n * sizeof(double));
        }
    }
    for (long tile = 0; tile < tiles; tile++)
        for (long i = 0; i < d; i++) acc[i] += parts[tile * d + i];
}
