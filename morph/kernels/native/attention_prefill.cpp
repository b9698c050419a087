// Flash attention (Dao et al., 2022) of one sequence, causal or sliding, over unit pages.
//
// One task is a kv head and a block of positions; its rows are (position, query head of the group). Keys come in tiles
// of 64 from position 0 on: the tile's keys are transposed once to float32 and meet all rows of the task, 12 rows at a
// time, so that scores never leave L1. Values are read where they lie. A row's result depends on its own scores and the
// fixed key tiles only: keys that are masked for it add exact zeros.

#include <algorithm>

#include "attention.h"
#include "tile.h"

namespace morph {
namespace {

constexpr long KEYS = 64;
constexpr long TASK_ROWS = 384;
constexpr float NONE = -__builtin_inff();

// 16 keys x 32 dims of bf16, or 16 x 16 of float32, to columns of the [dim][32] panels.
template <typename B>
void transpose_keys(const Pages& pages, long first, long count, float* MORPH_RESTRICT to) {
    constexpr long WIDE = 64 / sizeof(B);  // dims in one register
    for (long t = 0; t < KEYS; t += LANES) {
        const char* keys[LANES];
        for (long i = 0; i < LANES; i++) keys[i] = t + i < count ? pages.key(first + t + i) : nullptr;
        float* panel = to + t / TILE_COLS * pages.dim * TILE_COLS + t % TILE_COLS;
        for (long d = 0; d < pages.dim; d += WIDE) {
            vu x[LANES];
#pragma GCC unroll 16
            for (long i = 0; i < LANES; i++) x[i] = keys[i] ? load_pairs(keys[i] + d * sizeof(B)) : vu{};
            transpose16(x);
            for (long i = 0; i < LANES; i++) {
                if constexpr (sizeof(B) == 2) {
                    store(panel + (d + 2 * i) * TILE_COLS, even_of(x[i]));
                    store(panel + (d + 2 * i + 1) * TILE_COLS, odd_of(x[i]));
                } else {
                    store(panel + (d + i) * TILE_COLS, (vf)x[i]);
                }
            }
        }
    }
}

struct RowState {
    float max;
    vf sum;  // one partial sum per lane
};

// Scores [rows][64] in base 2 to weights, in place; rescales the rows' outputs where the maximum grew.
// Row r attends to keys [from[r], to[r]) of the tile; `masked` = some row does not attend to all.
template <bool MASKED>
MORPH_INLINE void soften(
    float* scores, int rows, const long* from, const long* to, RowState* state, float* out, long dim) {
    constexpr int V = KEYS / LANES;
    float base[TILE_ROWS];
    for (int r = 0; r < rows; r++) {
        vf x[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) x[i] = load(scores + r * KEYS + i * LANES);
        if (MASKED) {
            const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
            for (int i = 0; i < V; i++) {
                vi at = lane + i * LANES;
                x[i] = select((at >= (int)from[r]) & (at < (int)to[r]), x[i], splat(NONE));
                store(scores + r * KEYS + i * LANES, x[i]);
            }
        }
        float top = max_of(max(max(x[0], x[1]), max(x[2], x[3])));
        RowState& s = state[r];
        if (top > s.max) {
            vf shrink = exp2(splat(s.max - top));
            s.max = top;
            s.sum *= shrink;
            for (long d = 0; d < dim; d += LANES) store(out + r * dim + d, load(out + r * dim + d) * shrink);
        }
        // A row that has seen no key yet keeps weights of zero.
        base[r] = s.max == NONE ? 0.0f : s.max;
    }
    // Apart from the maxima, so that rows do not wait for each other.
    for (int r = 0; r < rows; r++) {
        vf x[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) {
            x[i] = exp2(load(scores + r * KEYS + i * LANES) - base[r]);
            store(scores + r * KEYS + i * LANES, x[i]);
        }
        state[r].sum += (x[0] + x[1]) + (x[2] + x[3]);
    }
}

template <typename B>
void attend(const Prefill& job, long kv_head, long first, long last) {
    static thread_local Scratch memory;
    const long dim = job.dim, group = job.heads / job.kv_heads, rows = (last - first) * group;
    float* q = memory.floats(2 * rows * dim + KEYS * dim + TILE_ROWS * KEYS + rows * LANES * 2);
    float* out = q + rows * dim;
    float* keys = out + rows * dim;
    float* scores = keys + KEYS * dim;
    RowState* state = reinterpret_cast<RowState*>(scores + TILE_ROWS * KEYS);
    const int32_t* units = job.table_row + kv_head * job.max_pages;
    const Pages pages{job.storage, job.unit_bytes, units, static_cast<uint32_t>(job.page_tokens), dim, sizeof(B)};

    const float scale = job.scale * LOG2E;
    for (long r = 0; r < rows; r++) {
        const float* from = job.q + (first + r / group) * job.q_stride + (kv_head * group + r % group) * dim;
        for (long d = 0; d < dim; d += LANES) store(q + r * dim + d, load(from + d) * scale);
        state[r] = {NONE, vf{}};
    }
    std::memset(out, 0, rows * dim * sizeof(float));

    const long all_keys = job.start + job.rows;
    const long oldest = job.window ? std::max(0L, job.start + first - job.window + 1) : 0;
    for (long tile_at = oldest / KEYS * KEYS; tile_at < job.start + last; tile_at += KEYS) {
        const long count = std::min(KEYS, all_keys - tile_at);
        transpose_keys<B>(pages, tile_at, count, keys);
        for_row_tiles(rows, [&](long row, int tall) {
            const long newest_query = job.start + first + (row + tall - 1) / group;
            const long oldest_query = job.start + first + row / group;
            if (newest_query < tile_at) return;
            if (job.window && tile_at + KEYS <= oldest_query - job.window + 1) return;
            const long seen = std::min(count, newest_query - tile_at + 1);
            for (long half = 0; half * TILE_COLS < seen; half++)
                tile_of<A::rows, float, false>(tall, q + row * dim, dim, keys + half * dim * TILE_COLS,
                                               TILE_COLS * sizeof(float), dim, scores + half * TILE_COLS, KEYS);
            bool masked = oldest_query < tile_at + KEYS - 1 || (job.window && newest_query - job.window >= tile_at);
            if (masked) {
                long from[TILE_ROWS], to[TILE_ROWS];
                for (int r = 0; r < tall; r++) {
                    long at = job.start + first + (row + r) / group - tile_at;
                    from[r] = job.window ? at - job.window + 1 : 0;
                    to[r] = at + 1;
                }
                soften<true>(scores, tall, from, to, state + row, out + row * dim, dim);
            } else {
                soften<false>(scores, tall, nullptr, nullptr, state + row, out + row * dim, dim);
            }
            // Not past `seen`: the weights there are zero, and what lies there may be no value at all.
            for (long t = 0; t < seen;) {
                long run = std::min(pages.run(tile_at + t), seen - t);
                const char* values = pages.value(tile_at + t);
                for (long d = 0; d < dim; d += TILE_COLS)
                    tile_of<A::rows, B, true>(tall, scores + t, KEYS, values + d * sizeof(B), dim * sizeof(B), run,
                                              out + row * dim + d, dim);
                t += run;
            }
        });
    }

    for (long r = 0; r < rows; r++) {
        float* to = job.out + (first + r / group) * job.heads * dim + (kv_head * group + r % group) * dim;
        const float* from = out + r * dim;
        const float share = 1.0f / sum(state[r].sum);
        for (long d = 0; d < dim; d += TILE_COLS)
            for (int i = 0; i < LANES; i++) {
                // bf16 values were taken apart into even and odd columns.
                long even = sizeof(B) == 2 ? 2 * i : i, odd = sizeof(B) == 2 ? 2 * i + 1 : i + LANES;
                to[d + even] = from[d + i] * share;
                to[d + odd] = from[d + LANES + i] * share;
            }
    }
}

}  // namespace

void prefill_attention(const Prefill& job) {
    const long group = job.heads / job.kv_heads;
    long positions = std::max(1L, TASK_ROWS / group);
    // Short prompts: smaller blocks, so that all threads have work.
    while (positions * group > 48 && ceil_div(job.rows, positions) * job.kv_heads < 4 * job.threads) positions /= 2;
    const long blocks = ceil_div(job.rows, positions);
#pragma omp parallel for num_threads(job.threads) schedule(dynamic, 1)
    for (long item = 0; item < blocks * job.kv_heads; item++) {
        // The last blocks see the most keys: first, so that the short ones fill the gaps at the end.
        long block = blocks - 1 - item / job.kv_heads, head = item % job.kv_heads;
        long first = block * positions, last = std::min(job.rows, first + positions);
        if (job.is_bf16)
            attend<bf16>(job, head, first, last);
        else
            attend<float>(job, head, first, last);
    }
}

}  // namespace morph

using namespace morph;

MORPH_API void morph_prefill_attention(
    const float* q, long q_stride, const void* storage, int64_t unit_bytes, const int32_t* table_row, long max_pages,
    long page_tokens, int is_bf16, long rows, long heads, long kv_heads, long dim, long start, double scale, float* out,
    int threads) {
    prefill_attention({q, q_stride, static_cast<const char*>(storage), unit_bytes, table_row, max_pages, page_tokens,
                       is_bf16, rows, heads, kv_heads, dim, start, 0, static_cast<float>(scale), out, threads});
}
