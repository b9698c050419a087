// One token of Gated DeltaNet per request: conv and norms first, then every state is read and written once.

#include <algorithm>

#include "gdn.h"

namespace morph {
namespace {

constexpr long MAX_WIDTH = 8;
constexpr int QUERIES = 4;

// One head of one row after the conv (and norm of q and k) to y; the tail's channels move on by one token.
void advance_head(const GdnParams& p, const float* x, float* tail, long head, float* y) {
    const long dim = p.dim, qkv = p.qkv(), keep = p.width - 1, channel = head * dim;
    const float* rows[MAX_WIDTH];
    for (long tap = 0; tap < keep; tap++) rows[tap] = tail + tap * qkv + channel;
    rows[keep] = x + channel;
    conv_head(rows, p.conv + channel, qkv, p.width, dim, y);
    for (long tap = 0; tap < keep; tap++)
        std::memcpy(tail + tap * qkv + channel, rows[tap + 1], dim * sizeof(float));
    if (head < p.heads + p.kv_heads) l2_normalise(y, dim);
}

// u = k^T S and w[i] = q[i]^T S for N queries, V registers wide.
template <int V, int N>
MORPH_INLINE void read_state(const float* state, const float* k, const float* q, vf* u, vf (*w)[V]) {
    constexpr long DIM = V * LANES;
#pragma GCC unroll 8
    for (int c = 0; c < V; c++) u[c] = vf{};
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 8
        for (int c = 0; c < V; c++) w[n][c] = vf{};
    for (long i = 0; i < DIM; i++) {
#pragma GCC unroll 8
        for (int c = 0; c < V; c++) {
            vf s = load(state + i * DIM + c * LANES);
            u[c] += k[i] * s;
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) w[n][c] += q[n * DIM + i] * s;
        }
    }
}

struct Gates {
    float decay, beta;
};

// o[n] = q[n]^T S' with S' = decay S + k v'^T, without reading S' again: decay (q^T S) + (q.k) v'.
template <int V, int N>
void step_queries(const float* state, const float* k, const float* v, const float* q, Gates g, vf* written, float* o) {
    constexpr long DIM = V * LANES;
    vf u[V], w[N][V];
    read_state<V, N>(state, k, q, u, w);
#pragma GCC unroll 8
    for (int c = 0; c < V; c++) written[c] = (load(v + c * LANES) - u[c] * g.decay) * g.beta;
    for (int n = 0; n < N; n++) {
        vf products = vf{};
        for (int c = 0; c < V; c++) products += load(q + n * DIM + c * LANES) * load(k + c * LANES);
        const float dot = sum(products);
#pragma GCC unroll 8
        for (int c = 0; c < V; c++) store(o + n * DIM + c * LANES, w[n][c] * g.decay + written[c] * dot);
    }
}

template <int V>
void step(float* state, const float* k, const float* v, const float* q, long queries, Gates g, float* o) {
    constexpr long DIM = V * LANES;
    vf written[V];
    for (long n = 0; n < queries; n += QUERIES) {
        switch (std::min<long>(QUERIES, queries - n)) {
            case 1: step_queries<V, 1>(state, k, v, q + n * DIM, g, written, o + n * DIM); break;
            case 2: step_queries<V, 2>(state, k, v, q + n * DIM, g, written, o + n * DIM); break;
            case 3: step_queries<V, 3>(state, k, v, q + n * DIM, g, written, o + n * DIM); break;
            default: step_queries<V, 4>(state, k, v, q + n * DIM, g, written, o + n * DIM);
        }
    }
    for (long i = 0; i < DIM; i++)
#pragma GCC unroll 8
        for (int c = 0; c < V; c++) {
            float* s = state + i * DIM + c * LANES;
            store(s, load(s) * g.decay + k[i] * written[c]);
        }
}

}  // namespace
}  // namespace morph

using namespace morph;

// x[rows][columns]: q, k, v | decay logits | write strength logits | ...; tails of slot s at tails + s * tail_stride.
MORPH_API void morph_gdn_decode(
    const GdnParams* params, const float* x, long x_stride, long rows, char* storage, int64_t unit_bytes,
    const int32_t* table, long table_stride, long page_tokens, int is_bf16, const int32_t* slots, float* tails,
    long tail_stride, const int32_t* positions, float* out, int threads) {
    static thread_local Scratch scratch;
    const GdnParams& p = *params;
    GdnMemory memory{storage, unit_bytes, table, table_stride, page_tokens, is_bf16};
    const long dim = p.dim, qkv = p.qkv(), all = p.heads + 2 * p.kv_heads, queries = p.queries();
    if (p.window) window_decode(p, memory, x, x_stride, rows, slots, positions, out, threads);
    float* mixed = scratch.floats(rows * qkv);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long item = 0; item < rows * all; item++) {
            long row = item / all, head = item % all;
            advance_head(p, x + row * x_stride, tails + slots[row] * tail_stride, head, mixed + row * qkv + head * dim);
        }
#pragma omp for schedule(static)
        for (long item = 0; item < rows * p.state_heads; item++) {
            long row = item / p.state_heads, head = item % p.state_heads, kv = p.kv_head_of(head);
            const float* q = mixed + row * qkv + head * queries * dim;
            const float* k = mixed + row * qkv + (p.heads + kv) * dim;
            const float* v = k + p.kv_heads * dim;
            const float* logits = x + row * x_stride + qkv;
            Gates g{exp1(log_sigmoid1(logits[head] + p.ab_bias[head])),
                    sigmoid1(logits[p.state_heads + head] + p.ab_bias[p.state_heads + head])};
            float* state = memory.state(slots[row], head);
            // The queries' own place takes their outputs: they are read before.
            float* o = const_cast<float*>(q);
            switch (dim) {
                case 32: step<2>(state, k, v, q, queries, g, o); break;
                case 64: step<4>(state, k, v, q, queries, g, o); break;
                case 96: step<6>(state, k, v, q, queries, g, o); break;
                default: step<8>(state, k, v, q, queries, g, o);
            }
            for (long n = 0; n < queries; n++) {
                const long query = head * queries + n;
                float* to = out + (row * p.heads + query) * dim;
                const float share = p.mix ? sigmoid1(p.mix[query]) : 0.0f;
                const float own = p.mix ? (1.0f - share) * p.gain[query] : p.gain[query];
                for (long d = 0; d < dim; d += LANES) {
                    vf y = load(o + n * dim + d) * own;
                    store(to + d, p.mix ? load(to + d) * share + y : y);
                }
            }
        }
    }
}
