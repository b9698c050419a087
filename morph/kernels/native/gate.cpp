// One gate's prediction for one request: fc2 . gelu(fc1 [mean | last | log n] + bias1) + bias2, all in float32.

#include "simd.h"

using namespace morph;

// sums [d] of the n prompt tokens' inputs in float64, last [d]; fc1 [width][2 d + 1], bias1 and fc2 [width].
MORPH_API float morph_gate(
    const double* sums, const float* last, long d, long n, const float* fc1, const float* bias1, const float* fc2,
    float bias2, long width) {
    static thread_local Scratch scratch;
    const long inputs = 2 * d + 1, padded = ceil_div(inputs, LANES) * LANES;
    float* features = scratch.floats(padded);
    const double tokens = static_cast<double>(n);
    for (long i = 0; i < d; i++) features[i] = static_cast<float>(sums[i] / tokens);
    std::memcpy(features + d, last, d * sizeof(float));
    features[2 * d] = static_cast<float>(std::log(tokens));
    float total = 0;
    for (long unit = 0; unit < width; unit++) {
        const float* weight = fc1 + unit * inputs;
        vf parts[2] = {vf{}, vf{}};
        long i = 0;
        for (; i + 2 * LANES <= inputs; i += 2 * LANES) {
            parts[0] += load(weight + i) * load(features + i);
            parts[1] += load(weight + i + LANES) * load(features + i + LANES);
        }
        float x = sum(parts[0] + parts[1]) + bias1[unit];
        for (; i < inputs; i++) x += weight[i] * features[i];
        total += fc2[unit] * 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
    }
    return total + bias2;
}
