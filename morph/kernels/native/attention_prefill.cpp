// Flash attention (Dao et al., 2022) of one sequence, causal or sliding, over unit pages.
//
// One task is a kv head and a block of positions; its rows are (position, query head of the group). Keys come in tiles
// of 64 from position 0 on: the tile's keys are transposed once to float32 and meet all rows of the task, 12 rows at a
// time, so that scores never leave L1. Values are read where they lie. A row's result depends on its own scores and the
// fixed key tiles only: keys that are masked for it add exact zeros.

#include "attention_tile.h"

namespace morph {
namespace {

constexpr long TASK_ROWS = 384;

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
            const bool masked = oldest_query < tile_at + KEYS - 1 || (job.window && newest_query - job.window >= tile_at);
            long from[TILE_ROWS], to[TILE_ROWS];
            for (int r = 0; masked && r < tall; r++) {
                long at = job.start + first + (row + r) / group - tile_at;
                from[r] = job.window ? at - job.window + 1 : 0;
                to[r] = at + 1;
            }
            attend_tile<B>(pages, q + row * dim, keys, tile_at, seen, tall, masked, from, to, scores, state + row,
                           out + row * dim);
        });
    }

    for (long r = 0; r < rows; r++) {
        float* to = job.out + (first + r / group) * job.heads * dim + (kv_head * group + r % group) * dim;
        finish_row<B>(out + r * dim, 1.0f / sum(state[r].sum), dim, to);
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
