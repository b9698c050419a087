// Gated delta rule over a prompt in chunks (WY form): S <- e^g S; v' = beta (v - k^T S); S <- S + k v'^T; o = q^T S.
//
// A thread takes some state heads through all chunks, chunk by chunk, with the states in its caches. Per chunk and
// head, with G the running sum of g:
//   V' = beta (V - e^G (K S)) solved through (I + A), A_ij = beta_i e^(G_i - G_j) k_i.k_j for j < i, by substitution,
//   O = e^G (Q S) + P V', P_ij = e^(G_i - G_j) q_i.k_j for j <= i, and S <- e^G_last S + (e^(G_last - G) K)^T V'.
// No inverse is formed, so nearly equal keys are no problem.

#include <algorithm>

#include "gdn.h"
#include "tile.h"

namespace morph {
namespace {

constexpr long CHUNK = 32;  // more tokens: more work in the triangles, and buffers fall out of L1

struct Job {
    const GdnParams& p;
    const float* x;  // [rows][columns], row stride in elements
    long x_stride, rows;
    const float* tail;  // [width - 1][qkv] or null: nothing before, and no states
    float* out;
};

struct Buffers {
    // Of one kv head: keys, values, keys transposed to [CHUNK / 32][dim][32], products of keys.
    float *k, *v, *kt, *kk;
    // Of one state head: written values v', query, output [CHUNK][dim]; a and p [CHUNK][CHUNK].
    float *written, *q, *o, *a, *p;
    // Running log decay in two floats, what is left of the chunk's start and at its end, write strengths [CHUNK].
    float *high, *low, *since, *until, *beta;

    Buffers(float* at, long dim) {
        for (float** each : {&k, &v, &kt, &written, &q, &o}) *each = at, at += CHUNK * dim;
        for (float** each : {&kk, &a, &p}) *each = at, at += CHUNK * CHUNK;
        for (float** each : {&high, &low, &since, &until, &beta}) *each = at, at += CHUNK;
    }
    static size_t size(long dim) { return 6 * CHUNK * dim + 3 * CHUNK * CHUNK + 5 * CHUNK; }
};

// Sends for columns [column, column + n) of tokens first…first + CHUNK - 1: rows are far apart in memory and the hardware
// does not see the next ones coming.
void prefetch(const float* x, long stride, long column, long n, long first, long rows) {
    const long last = std::min(rows, first + CHUNK);
    for (long t = first; t < last; t++) {
        const float* row = x + t * stride + column;
        for (long d = 0; d < n + LANES - 1; d += LANES) __builtin_prefetch(row + std::min(d, n - 1), 0, 2);
    }
}

// Channels [channel, channel + dim) of tokens first…first + count - 1 after the conv, WIDTH taps.
template <long WIDTH>
void conv_chunk(const Job& job, long channel, long first, long count, float* y) {
    const GdnParams& p = job.p;
    const long qkv = p.qkv();
    for (long d = 0; d < p.dim; d += 2 * LANES) {
        vf weight[WIDTH][2], window[WIDTH][2];
#pragma GCC unroll 8
        for (long tap = 0; tap < WIDTH; tap++)
#pragma GCC unroll 2
            for (long h = 0; h < 2; h++) weight[tap][h] = load(p.conv + tap * qkv + channel + d + h * LANES);
#pragma GCC unroll 8
        for (long tap = 1; tap < WIDTH; tap++)
#pragma GCC unroll 2
            for (long h = 0; h < 2; h++) {
                const long at = first - WIDTH + tap, column = channel + d + h * LANES;
                if (at >= 0)
                    window[tap][h] = load(job.x + at * job.x_stride + column);
                else
                    window[tap][h] = job.tail ? load(job.tail + (at + WIDTH - 1) * qkv + column) : vf{};
            }
        const float* x = job.x + first * job.x_stride + channel + d;
        for (long t = 0; t < count; t++, x += job.x_stride) {
#pragma GCC unroll 2
            for (long h = 0; h < 2; h++) {
#pragma GCC unroll 8
                for (long tap = 0; tap + 1 < WIDTH; tap++) window[tap][h] = window[tap + 1][h];
                window[WIDTH - 1][h] = load(x + h * LANES);
                vf total = window[0][h] * weight[0][h];
#pragma GCC unroll 8
                for (long tap = 1; tap < WIDTH; tap++) total += window[tap][h] * weight[tap][h];
                store(y + t * p.dim + d + h * LANES, total);
            }
        }
    }
}

void conv_chunk(const Job& job, long channel, long first, long count, float* y) {
    switch (job.p.width) {
        case 1: conv_chunk<1>(job, channel, first, count, y); break;
        case 2: conv_chunk<2>(job, channel, first, count, y); break;
        case 3: conv_chunk<3>(job, channel, first, count, y); break;
        case 4: conv_chunk<4>(job, channel, first, count, y); break;
        case 5: conv_chunk<5>(job, channel, first, count, y); break;
        case 6: conv_chunk<6>(job, channel, first, count, y); break;
        case 7: conv_chunk<7>(job, channel, first, count, y); break;
        default: conv_chunk<8>(job, channel, first, count, y);
    }
}

// Running log decay (in two floats: one token that decays by e^-1000 must not cost later differences their digits),
// what is left of the chunk's start and at its end, and write strengths.
void gates(const Job& job, long head, long first, long count, const Buffers& b) {
    const GdnParams& p = job.p;
    double total = 0;
    for (long t = 0; t < CHUNK; t += LANES) {
        float decay[LANES], strength[LANES];
        for (long i = 0; i < LANES; i++) {
            const float* logits = job.x + (first + t + i) * job.x_stride + p.qkv();
            const bool live = t + i < count;
            decay[i] = live ? logits[head] : 0.0f;
            strength[i] = live ? logits[p.state_heads + head] : 0.0f;
        }
        store(decay, log_sigmoid(load(decay) + p.ab_bias[head]));
        store(b.beta + t, sigmoid(load(strength) + p.ab_bias[p.state_heads + head]));
        for (long i = 0; i < LANES; i++) {
            if (t + i < count) total += decay[i];
            b.high[t + i] = static_cast<float>(total);
            b.low[t + i] = static_cast<float>(total - b.high[t + i]);
        }
    }
    for (long t = 0; t < CHUNK; t += LANES) {
        store(b.since + t, exp(load(b.high + t)));
        store(b.until + t, exp((b.high[count - 1] - load(b.high + t)) + (b.low[count - 1] - load(b.low + t))));
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

// to = from, row i times factor_i e^(G_i - G_j) for j < i + `own`, zero from there to the end of the row's last tile.
void decay_rows(const Buffers& b, const float* factor, int own, long count, const float* from, float* to) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (long i = 0; i < count; i++) {
        const vf high = splat(b.high[i]), low = splat(b.low[i]);
        const float scale = factor ? -factor[i] : 1.0f;
        const long end = std::min(CHUNK, (i / LANES + 1) * LANES);
        for (long j = 0; j < end; j += LANES) {
            vf gap = (high - load(b.high + j)) + (low - load(b.low + j));
            vi live = lane + (int)j < (int)(i + own);
            vf x = load(from + i * CHUNK + j) * exp(select(live, gap, splat(0.0f))) * scale;
            store(to + i * CHUNK + j, select(live, x, splat(0.0f)));
        }
        for (long j = end; j < std::min(CHUNK, end + LANES); j += LANES) store(to + i * CHUNK + j, vf{});
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

// Keys, values and products of keys of one kv head and chunk.
void load_kv(const Job& job, long kv, long first, long count, const Buffers& b) {
    const GdnParams& p = job.p;
    const long dim = p.dim, key = (p.heads + kv) * dim, value = key + p.kv_heads * dim;
    conv_chunk(job, key, first, count, b.k);
    conv_chunk(job, value, first, count, b.v);
    prefetch(job.x, job.x_stride, key, dim, first + CHUNK, job.rows);
    prefetch(job.x, job.x_stride, value, dim, first + CHUNK, job.rows);
    for (long t = 0; t < count; t++) l2_normalise(b.k + t * dim, dim);
    std::memset(b.k + count * dim, 0, (CHUNK - count) * dim * sizeof(float));
    transpose_keys(b.k, dim, b.kt);
    times_keys(b.k, b.kt, count, dim, b.kk);
}

// Outputs of one query head in b.o, from b.written and the state before the chunk.
void read_out(const Job& job, long query, long first, long count, const float* state, const Buffers& b) {
    const GdnParams& p = job.p;
    const long dim = p.dim;
    conv_chunk(job, query * dim, first, count, b.q);
    prefetch(job.x, job.x_stride, query * dim, dim, first + CHUNK, job.rows);
    for (long t = 0; t < count; t++) l2_normalise(b.q + t * dim, dim);
    times_keys(b.q, b.kt, count, dim, b.p);
    decay_rows(b, nullptr, 1, count, b.p, b.p);
    times_state(b.q, state, count, dim, b.o);
    for (long t = 0; t < count; t++)
        for (long d = 0; d < dim; d += LANES) store(b.o + t * dim + d, load(b.o + t * dim + d) * b.since[t]);
    for_row_tiles(count, [&](long row, int tall) {
        for (long d = 0; d < dim; d += TILE_COLS)
            tile_of<A::rows, float, true>(tall, b.p + row * CHUNK, CHUNK, b.written + d, dim * sizeof(float),
                                          row + tall, b.o + row * dim + d, dim);
    });
    // The window's output, if there is one, is in `out` already.
    const float share = p.mix ? sigmoid1(p.mix[query]) : 0.0f, own = (1.0f - share) * p.gain[query];
    for (long t = 0; t < count; t++) {
        float* to = job.out + (first + t) * p.heads * dim + query * dim;
        for (long d = 0; d < dim; d += LANES) {
            vf y = load(b.o + t * dim + d) * own;
            store(to + d, p.mix ? load(to + d) * share + y : y);
        }
    }
}

// One chunk of one state head whose kv head is loaded.
void run_chunk(const Job& job, long head, long first, long count, float* state, const Buffers& b) {
    const GdnParams& p = job.p;
    const long dim = p.dim, queries = p.queries();
    gates(job, head, first, count, b);
    decay_rows(b, b.beta, 0, count, b.kk, b.a);
    times_state(b.k, state, count, dim, b.written);
    for (long t = 0; t < count; t++)
        for (long d = t * dim; d < (t + 1) * dim; d += LANES)
            store(b.written + d, (load(b.v + d) - load(b.written + d) * b.since[t]) * b.beta[t]);
    substitute(b.a, count, dim, b.written);
    for (long query = head * queries; query < (head + 1) * queries; query++)
        read_out(job, query, first, count, state, b);

    for (long i = 0; i < dim * dim; i += LANES) store(state + i, load(state + i) * b.since[count - 1]);
    for (long t = 0; t < count; t++)
        for (long d = t * dim; d < (t + 1) * dim; d += LANES) store(b.written + d, load(b.written + d) * b.until[t]);
    for_row_tiles(dim, [&](long row, int tall) {
        for (long d = 0; d < dim; d += TILE_COLS)
            tile_of<A::columns, float, true>(tall, b.k + row, dim, b.written + d, dim * sizeof(float), count,
                                             state + row * dim + d, dim);
    });
}

// State heads [begin, end) over all rows.
void run_heads(const Job& job, const GdnMemory& memory, long begin, long end) {
    static thread_local Scratch scratch;
    const GdnParams& p = job.p;
    const long size = p.dim * p.dim;
    float* states = scratch.floats((end - begin) * size + Buffers::size(p.dim));
    Buffers b(states + (end - begin) * size, p.dim);
    for (long head = begin; head < end; head++) {
        float* state = states + (head - begin) * size;
        if (job.tail)
            std::memcpy(state, memory.state(0, head), size * sizeof(float));
        else
            std::memset(state, 0, size * sizeof(float));
    }
    for (long first = 0; first < job.rows; first += CHUNK) {
        const long count = std::min(CHUNK, job.rows - first);
        for (long head = begin; head < end; head++) {
            if (head == begin || p.kv_head_of(head) != p.kv_head_of(head - 1))
                load_kv(job, p.kv_head_of(head), first, count, b);
            run_chunk(job, head, first, count, states + (head - begin) * size, b);
        }
    }
    for (long head = begin; head < end; head++)
        std::memcpy(memory.state(0, head), states + (head - begin) * size, size * sizeof(float));
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
    if (p.window) window_prefill(p, memory, x, x_stride, rows, start, has_state ? start : 0, out, threads);
    Job job{p, x, x_stride, rows, has_state ? tail : nullptr, out};
    const long parts = std::min<long>(threads, p.state_heads);
#pragma omp parallel for num_threads(parts) schedule(static, 1)
    for (long part = 0; part < parts; part++)
        run_heads(job, memory, p.state_heads * part / parts, p.state_heads * (part + 1) / parts);
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
