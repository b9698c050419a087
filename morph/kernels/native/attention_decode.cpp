// Attention of one new token per request: reads every key and value once, at the speed of memory.
//
// A request's keys are cut into chunks of fixed size; a task is a (request, kv head, chunk) and meets all query heads of
// the group. Chunks are merged in order, so a row's result depends on its own keys only, never on batch or threads.

#include <algorithm>

#include "attention.h"

namespace morph {
namespace {

constexpr long CHUNK = 256;
constexpr long AHEAD = 24;  // tokens; pages lie anywhere, so the hardware does not see the next one coming
constexpr int GROUP = 4;  // query heads that share one pass over the keys
constexpr float NONE = -__builtin_inff();

// 32 elements as two registers: even and odd ones of bf16, first and second half of float32.
template <typename B>
MORPH_INLINE void load32(const char* p, vf* a, vf* b) {
    if constexpr (sizeof(B) == 2) {
        vu pairs = load_pairs(p);
        *a = even_of(pairs);
        *b = odd_of(pairs);
    } else {
        *a = load(reinterpret_cast<const float*>(p));
        *b = load(reinterpret_cast<const float*>(p) + LANES);
    }
}

template <typename B>
MORPH_INLINE long place_of(long d) {
    if (sizeof(B) == 4) return d;
    return d / 32 * 32 + d % 2 * 16 + d % 32 / 2;
}

MORPH_INLINE void prefetch(const char* p, long bytes) {
    for (long at = 0; at < bytes; at += 64) __builtin_prefetch(p + at);
}

// One chunk for G query heads: out[g][dim] = sum of e^(score - max) v, in `load32` order; stats[g] = {max, sum}.
template <typename B, int G, int D32>
void chunk(const Pages& pages, const float* q, long first, long count, float* out, long out_stride, float* stats) {
    constexpr long DIM = D32 * 32;
    alignas(64) float scores[G * CHUNK];
    vf top[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) top[g] = splat(NONE);
    for (long t = 0; t < count; t += LANES) {
        vf dots[G][LANES];
        long live = std::min<long>(LANES, count - t);
        for (long i = 0; i < LANES; i++) {
            if (i >= live) {
                for (int g = 0; g < G; g++) dots[g][i] = vf{};
                continue;
            }
            const char* key = pages.key(first + t + i);
            if (t + i + AHEAD < count) prefetch(pages.key(first + t + i + AHEAD), DIM * sizeof(B));
            vf dot[G][2];
#pragma GCC unroll 4
            for (int c = 0; c < D32; c++) {
                vf a, b;
                load32<B>(key + c * 32 * sizeof(B), &a, &b);
#pragma GCC unroll 4
                for (int g = 0; g < G; g++) {
                    vf x = load(q + g * DIM + c * 32) * a, y = load(q + g * DIM + c * 32 + LANES) * b;
                    dot[g][0] = c ? dot[g][0] + x : x;
                    dot[g][1] = c ? dot[g][1] + y : y;
                }
            }
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) dots[g][i] = dot[g][0] + dot[g][1];
        }
        const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            vf x = sum16(dots[g]);
            if (live < LANES) x = select(lane < (int)live, x, splat(NONE));
            store(scores + g * CHUNK + t, x);
            top[g] = max(top[g], x);
        }
    }
    vf acc[G][D32 * 2];
    for (int g = 0; g < G; g++) {
        float m = max_of(top[g]);
        vf total = vf{};
        for (long t = 0; t < count; t += LANES) {
            vf p = exp2(load(scores + g * CHUNK + t) - m);
            store(scores + g * CHUNK + t, p);
            total += p;
        }
        stats[2 * g] = m;
        stats[2 * g + 1] = sum(total);
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int c = 0; c < D32 * 2; c++) acc[g][c] = vf{};
    for (long t = 0; t < count;) {
        long run = std::min(pages.run(first + t), count - t);
        const char* value = pages.value(first + t);
        for (long i = 0; i < run; i++, value += DIM * sizeof(B)) {
            if (t + i + AHEAD < count) prefetch(pages.value(first + t + i + AHEAD), DIM * sizeof(B));
#pragma GCC unroll 4
            for (int c = 0; c < D32; c++) {
                vf a, b;
                load32<B>(value + c * 32 * sizeof(B), &a, &b);
#pragma GCC unroll 4
                for (int g = 0; g < G; g++) {
                    acc[g][2 * c] += scores[g * CHUNK + t + i] * a;
                    acc[g][2 * c + 1] += scores[g * CHUNK + t + i] * b;
                }
            }
        }
        t += run;
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int c = 0; c < D32 * 2; c++) store(out + g * out_stride + c * LANES, acc[g][c]);
}

template <typename B, int D32>
void chunk_of(int group, const Pages& pages, const float* q, long first, long count, float* out, long out_stride,
              float* stats) {
    switch (group) {
        case 1: chunk<B, 1, D32>(pages, q, first, count, out, out_stride, stats); break;
        case 2: chunk<B, 2, D32>(pages, q, first, count, out, out_stride, stats); break;
        case 3: chunk<B, 3, D32>(pages, q, first, count, out, out_stride, stats); break;
        default: chunk<B, 4, D32>(pages, q, first, count, out, out_stride, stats);
    }
}

struct Task {
    int32_t row, first;
};

template <typename B>
void run_task(const Decode& job, const Task& task, long kv_head, float* partial) {
    const long dim = job.dim, group = job.heads / job.kv_heads;
    alignas(64) float q[GROUP * 128];
    const int32_t* units = job.table + job.slots[task.row] * job.table_stride + kv_head * job.max_pages;
    Pages pages{job.storage, job.unit_bytes, units, static_cast<uint32_t>(job.page_tokens), dim, sizeof(B)};
    const long count = std::min<long>(CHUNK, job.lens[task.row] - task.first);
    const float scale = job.scale * LOG2E;
    for (long g = 0; g < group; g += GROUP) {
        int heads = static_cast<int>(std::min<long>(GROUP, group - g));
        for (int h = 0; h < heads; h++) {
            const float* from = job.q + task.row * job.q_stride + (kv_head * group + g + h) * dim;
            for (long d = 0; d < dim; d++) q[h * dim + place_of<B>(d)] = from[d] * scale;
        }
        float* out = partial + g * dim;
        float* stats = partial + group * dim + 2 * g;
        switch (dim) {
            case 32: chunk_of<B, 1>(heads, pages, q, task.first, count, out, dim, stats); break;
            case 64: chunk_of<B, 2>(heads, pages, q, task.first, count, out, dim, stats); break;
            case 96: chunk_of<B, 3>(heads, pages, q, task.first, count, out, dim, stats); break;
            default: chunk_of<B, 4>(heads, pages, q, task.first, count, out, dim, stats);
        }
    }
}

}  // namespace

void decode_attention(const Decode& job) {
    static thread_local Scratch task_memory, partial_memory;
    const long dim = job.dim, group = job.heads / job.kv_heads;
    const long partial_size = group * (dim + 2);
    long count = 0;
    for (long row = 0; row < job.rows; row++) count += ceil_div(job.lens[row], CHUNK);
    // starts[row] = first task of the row.
    Task* tasks = static_cast<Task*>(task_memory.bytes(count * sizeof(Task) + (job.rows + 1) * sizeof(long)));
    long* starts = reinterpret_cast<long*>(tasks + count);
    long at = 0;
    for (long row = 0; row < job.rows; row++) {
        starts[row] = at;
        for (long first = 0; first < job.lens[row]; first += CHUNK)
            tasks[at++] = {static_cast<int32_t>(row), static_cast<int32_t>(first)};
    }
    starts[job.rows] = at;
    float* partials = partial_memory.floats(count * job.kv_heads * partial_size);

#pragma omp parallel num_threads(job.threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (long item = 0; item < count * job.kv_heads; item++) {
            float* partial = partials + item * partial_size;
            if (job.is_bf16)
                run_task<bf16>(job, tasks[item / job.kv_heads], item % job.kv_heads, partial);
            else
                run_task<float>(job, tasks[item / job.kv_heads], item % job.kv_heads, partial);
        }
#pragma omp for schedule(static)
        for (long item = 0; item < job.rows * job.heads; item++) {
            long row = item / job.heads, head = item % job.heads, kv_head = head / group, g = head % group;
            float* out = job.out + item * dim;
            float top = NONE, total = 0;
            for (long task = starts[row]; task < starts[row + 1]; task++)
                top = std::max(top, partials[(task * job.kv_heads + kv_head) * partial_size + group * dim + 2 * g]);
            alignas(64) float sums[128] = {};
            for (long task = starts[row]; task < starts[row + 1]; task++) {
                const float* partial = partials + (task * job.kv_heads + kv_head) * partial_size;
                const float* stats = partial + group * dim + 2 * g;
                float weight = std::exp2(stats[0] - top);
                total += weight * stats[1];
                for (long d = 0; d < dim; d++) sums[d] += weight * partial[g * dim + d];
            }
            float share = total > 0 ? 1.0f / total : 0.0f;
            for (long d = 0; d < dim; d++)
                out[d] = sums[job.is_bf16 ? place_of<bf16>(d) : place_of<float>(d)] * share;
        }
    }
}

}  // namespace morph

using namespace morph;

MORPH_API void morph_decode_attention(
    const float* q, long q_stride, const void* storage, int64_t unit_bytes, const int32_t* table, long table_stride,
    long max_pages, long page_tokens, int is_bf16, const int32_t* slots, const int32_t* lens, long rows, long heads,
    long kv_heads, long dim, double scale, float* out, int threads) {
    decode_attention({q, q_stride, static_cast<const char*>(storage), unit_bytes, table, table_stride, max_pages,
                      page_tokens, is_bf16, slots, lens, rows, heads, kv_heads, dim, static_cast<float>(scale), out,
                      threads});
}
