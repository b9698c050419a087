// Gated delta rule over a prompt in chunks (WY form): S <- e^g S; v' = beta (v - k^T S); S <- S + k v'^T; o = q^T S.
//
// A task is one state head and runs all chunks in order with the state in L1. Per chunk, with G the running sum of g:
//   V' = beta (V - e^G (K S)) solved through (I + A), A_ij = beta_i e^(G_i - G_j) k_i.k_j for j < i, by substitution,
//   O = e^G (Q S) + P V', P_ij = e^(G_i - G_j) q_i.k_j for j <= i, and S <- e^G_last S + (e^(G_last - G) K)^T V'.
// No inverse is formed, so nearly equal keys are no problem.

#include <algorithm>

#include "gdn.h"
#include "tile.h"

namespace morph {
namespace {

constexpr long CHUNK = 64;
constexpr long MAX_WIDTH = 16;

struct Job {
    const GdnParams& p;
    const float* x;  // [rows][columns], row stride in elements
    long x_stride, rows;
    const float* tail;  // [width - 1][qkv] or null: nothing before
    const float* zeros;
    float* out;
};

struct Buffers {
    float *k, *v, *q, *o;      // [CHUNK][dim]; v becomes v'
    float* kt;                 // [2][dim][32]
    float *a, *p;              // [CHUNK][CHUNK]
    float *high, *low;         // running log decay in two floats [CHUNK]
    float *since, *until, *beta;

    explicit Buffers(Scratch& memory, long dim) {
        float* at = memory.floats(5 * CHUNK * dim + 2 * CHUNK * CHUNK + 5 * CHUNK);
        auto take = [&](long count) {
            float* p = at;
            at += count;
            return p;
        };
        k = take(CHUNK * dim), v = take(CHUNK * dim), q = take(CHUNK * dim), o = take(CHUNK * dim), kt = take(CHUNK * dim);
        a = take(CHUNK * CHUNK), p = take(CHUNK * CHUNK);
        high = take(CHUNK), low = take(CHUNK), since = take(CHUNK), until = take(CHUNK), beta = take(CHUNK);
    }
};

// Channels [channel, channel + dim) of tokens first…first + count - 1 after the conv.
void conv_chunk(const Job& job, long channel, long first, long count, float* y) {
    const GdnParams& p = job.p;
    const long width = p.width, qkv = p.qkv();
    for (long t = 0; t < count; t++) {
        const float* rows[MAX_WIDTH];
        for (long tap = 0; tap < width; tap++) {
            long at = first + t - (width - 1) + tap;
            if (at >= 0)
                rows[tap] = job.x + at * job.x_stride + channel;
            else
                rows[tap] = job.tail ? job.tail + (at + width - 1) * qkv + channel : job.zeros;
        }
        if (width == 4)
            conv_head(rows, p.conv + channel, qkv, 4, p.dim, y + t * p.dim);
        else
            conv_head(rows, p.conv + channel, qkv, width, p.dim, y + t * p.dim);
    }
}

void transpose_keys(const float* k, long dim, float* kt) {
    for (long t = 0; t < CHUNK; t += LANES)
        for (long d = 0; d < dim; d += LANES) {
            vu x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) x[i] = (vu)load(k + (t + i) * dim + d);
            transpose16(x);
            float* to = kt + t / TILE_COLS * dim * TILE_COLS + d * TILE_COLS + t % TILE_COLS;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) store(to + i * TILE_COLS, (vf)x[i]);
        }
}

// c[count][CHUNK] = x[count][dim] K^T, on and below the diagonal (some of what lies above, too).
void times_keys(const float* x, const float* kt, long count, long dim, float* c) {
    for_row_tiles(count, [&](long row, int tall) {
        for (long t = 0; t < row + tall; t += TILE_COLS)
            tile_of<A::rows, float, false>(tall, x + row * dim, dim, kt + t * dim, TILE_COLS * sizeof(float), dim,
                                           c + row * CHUNK + t, CHUNK);
    });
}

// c[count][dim] = x[count][dim] S.
void times_state(const float* x, const float* state, long count, long dim, float* c) {
    for_row_tiles(count, [&](long row, int tall) {
        for (long d = 0; d < dim; d += TILE_COLS)
            tile_of<A::rows, float, false>(tall, x + row * dim, dim, state + d, dim * sizeof(float), dim,
                                           c + row * dim + d, dim);
    });
}

// Row i of c times factor_i e^(G_i - G_j) for j < i + `own`, zero from there to the end of the row's last tile.
void decay_rows(const Buffers& b, const float* factor, int own, long count, float* c) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (long i = 0; i < count; i++) {
        const vf high = splat(b.high[i]), low = splat(b.low[i]);
        const float scale = factor ? -factor[i] : 1.0f;
        const long end = std::min(CHUNK, (i / LANES + 1) * LANES);
        for (long j = 0; j < end; j += LANES) {
            vf gap = (high - load(b.high + j)) + (low - load(b.low + j));
            vi live = lane + (int)j < (int)(i + own);
            vf x = load(c + i * CHUNK + j) * exp(select(live, gap, splat(0.0f))) * scale;
            store(c + i * CHUNK + j, select(live, x, splat(0.0f)));
        }
        for (long j = end; j < std::min(CHUNK, end + LANES); j += LANES) store(c + i * CHUNK + j, vf{});
    }
}

// Solves (I - a) x = x in place, a strictly lower triangular [count][CHUNK], x [count][dim].
void substitute(const float* a, long count, long dim, float* x) {
    for_row_tiles(count, [&](long row, int tall) {
        if (row)
            for (long d = 0; d < dim; d += TILE_COLS)
                tile_of<A::rows, float, true>(tall, a + row * CHUNK, CHUNK, x + d, dim * sizeof(float), row,
                                              x + row * dim + d, dim);
        for (long d = 0; d < dim; d += TILE_COLS) {
            vf done[TILE_ROWS][2];
#pragma GCC unroll 12
            for (int i = 0; i < TILE_ROWS; i++) {
                if (i >= tall) break;
                vf s0 = load(x + (row + i) * dim + d), s1 = load(x + (row + i) * dim + d + LANES);
                const float* factors = a + (row + i) * CHUNK + row;
#pragma GCC unroll 12
                for (int j = 0; j < i; j++) {
                    s0 += factors[j] * done[j][0];
                    s1 += factors[j] * done[j][1];
                }
                done[i][0] = s0;
                done[i][1] = s1;
                store(x + (row + i) * dim + d, s0);
                store(x + (row + i) * dim + d + LANES, s1);
            }
        }
    });
}

void run_head(const Job& job, long head, float* state) {
    static thread_local Scratch memory;
    const GdnParams& p = job.p;
    const long dim = p.dim, kv = p.kv_head_of(head), queries = p.queries();
    Buffers b(memory, dim);
    for (long first = 0; first < job.rows; first += CHUNK) {
        const long count = std::min(CHUNK, job.rows - first);
        conv_chunk(job, (p.heads + kv) * dim, first, count, b.k);
        conv_chunk(job, (p.heads + p.kv_heads + kv) * dim, first, count, b.v);
        double total = 0;
        for (long t = 0; t < CHUNK; t++) {
            if (t < count) {
                l2_normalise(b.k + t * dim, dim);
                const float* logits = job.x + (first + t) * job.x_stride + p.qkv();
                total += log_sigmoid1(logits[head] + p.ab_bias[head]);
                b.beta[t] = sigmoid1(logits[p.state_heads + head] + p.ab_bias[p.state_heads + head]);
            } else {
                std::memset(b.k + t * dim, 0, dim * sizeof(float));
            }
            // Two floats: one token that decays by e^-1000 must not cost later differences their digits.
            b.high[t] = static_cast<float>(total);
            b.low[t] = static_cast<float>(total - b.high[t]);
        }
        for (long t = 0; t < CHUNK; t += LANES) {
            store(b.since + t, exp(load(b.high + t)));
            store(b.until + t, exp((b.high[count - 1] - load(b.high + t)) + (b.low[count - 1] - load(b.low + t))));
        }
        transpose_keys(b.k, dim, b.kt);
        times_keys(b.k, b.kt, count, dim, b.a);
        decay_rows(b, b.beta, 0, count, b.a);
        times_state(b.k, state, count, dim, b.o);
        for (long t = 0; t < count; t++)
            for (long d = 0; d < dim; d += LANES) {
                float* v = b.v + t * dim + d;
                store(v, (load(v) - load(b.o + t * dim + d) * b.since[t]) * b.beta[t]);
            }
        substitute(b.a, count, dim, b.v);

        for (long query = head * queries; query < (head + 1) * queries; query++) {
            conv_chunk(job, query * dim, first, count, b.q);
            for (long t = 0; t < count; t++) l2_normalise(b.q + t * dim, dim);
            times_keys(b.q, b.kt, count, dim, b.p);
            decay_rows(b, nullptr, 1, count, b.p);
            times_state(b.q, state, count, dim, b.o);
            for (long t = 0; t < count; t++)
                for (long d = 0; d < dim; d += LANES) store(b.o + t * dim + d, load(b.o + t * dim + d) * b.since[t]);
            for_row_tiles(count, [&](long row, int tall) {
                for (long d = 0; d < dim; d += TILE_COLS)
                    tile_of<A::rows, float, true>(tall, b.p + row * CHUNK, CHUNK, b.v + d, dim * sizeof(float),
                                                  row + tall, b.o + row * dim + d, dim);
            });
            float gain = p.gain[query];
            if (p.mix) {
                // The window's output is there already.
                const float share = sigmoid1(p.mix[query]);
                for (long t = 0; t < count; t++) {
                    float* to = job.out + (first + t) * p.heads * dim + query * dim;
                    for (long d = 0; d < dim; d += LANES)
                        store(to + d, load(to + d) * share + load(b.o + t * dim + d) * ((1.0f - share) * gain));
                }
            } else {
                for (long t = 0; t < count; t++)
                    for (long d = 0; d < dim; d += LANES)
                        store(job.out + (first + t) * p.heads * dim + query * dim + d, load(b.o + t * dim + d) * gain);
            }
        }

        for (long i = 0; i < dim * dim; i += LANES) store(state + i, load(state + i) * b.since[count - 1]);
        for (long t = 0; t < count; t++)
            for (long d = 0; d < dim; d += LANES) store(b.k + t * dim + d, load(b.k + t * dim + d) * b.until[t]);
        for_row_tiles(dim, [&](long row, int tall) {
            for (long d = 0; d < dim; d += TILE_COLS)
                tile_of<A::columns, float, true>(tall, b.k + row, dim, b.v + d, dim * sizeof(float), count,
                                                 state + row * dim + d, dim);
        });
    }
}

}  // namespace
}  // namespace morph

using namespace morph;

// x[rows][columns]: q, k, v | decay logits | write strength logits | ...; tail[width - 1][qkv] is updated.
MORPH_API void morph_gdn_prefill(
    const GdnParams* params, const float* x, long x_stride, long rows, char* storage, int64_t unit_bytes,
    const int32_t* table_row, long page_tokens, int is_bf16, float* tail, int has_state, long start, float* out,
    int threads) {
    const GdnParams& p = *params;
    GdnMemory memory{storage, unit_bytes, table_row, 0, page_tokens, is_bf16};
    static const float zeros[256] = {};
    if (p.window) window_prefill(p, memory, x, x_stride, rows, start, has_state ? start : 0, out, threads);
    Job job{p, x, x_stride, rows, has_state ? tail : nullptr, zeros, out};
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (long head = 0; head < p.state_heads; head++) {
        static thread_local Scratch state_memory;
        float* state = state_memory.floats(p.dim * p.dim);
        const size_t bytes = p.dim * p.dim * sizeof(float);
        if (has_state)
            std::memcpy(state, memory.state(0, head), bytes);
        else
            std::memset(state, 0, bytes);
        run_head(job, head, state);
        std::memcpy(memory.state(0, head), state, bytes);
    }
    const long keep = p.width - 1, qkv = p.qkv();
    for (long i = 0; i < keep; i++) {
        // Oldest first: reads of the old tail stay ahead of the writes.
        long at = rows - keep + i;
        float* to = tail + i * qkv;
        if (at >= 0)
            std::memcpy(to, x + at * x_stride, qkv * sizeof(float));
        else if (has_state)
            std::memmove(to, tail + (at + keep) * qkv, qkv * sizeof(float));
        else
            std::memset(to, 0, qkv * sizeof(float));
    }
}
