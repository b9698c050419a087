// Sliding-window attention inside the SSM mixer: RoPE on q and k as projected, keys and values in a ring of pages.

#include <algorithm>

#include "attention.h"
#include "gdn.h"
#include "rope.h"

namespace morph {
namespace {

struct Ring {
    const GdnParams& p;
    const GdnMemory& memory;

    long pages() const { return ceil_div(p.window, memory.page_tokens); }
    const int32_t* units(long slot) const { return memory.table + slot * memory.table_stride + p.state_heads; }
    long bytes() const { return p.dim * (memory.is_bf16 ? 2 : 4); }  // of one key

    // Key (which = 0) or value (1) of a token in the ring of a slot.
    char* at(long slot, long kv_head, long token, long which) const {
        long place = token % p.window;
        int64_t unit = units(slot)[kv_head * pages() + place / memory.page_tokens];
        return memory.storage + unit * memory.unit_bytes +
               (which * memory.page_tokens + place % memory.page_tokens) * bytes();
    }
};

}  // namespace

void window_prefill(
    const GdnParams& p, const GdnMemory& memory, const float* x, long x_stride, long rows, long start, long known,
    float* out, int threads) {
    static thread_local Scratch query_memory, page_memory, table_memory;
    const Ring ring{p, memory};
    const long dim = p.dim, half = dim / 2, bytes = ring.bytes(), tokens = memory.page_tokens;
    // Keys and values of the window before and of the new tokens as pages in order, in the rounding of the ring.
    const long before = std::min(known, p.window - 1), keys = before + rows, pages = ceil_div(keys, tokens);
    float* q = query_memory.floats(rows * p.heads * dim);
    char* storage = static_cast<char*>(page_memory.bytes(p.kv_heads * pages * memory.unit_bytes));
    int32_t* table = static_cast<int32_t*>(table_memory.bytes(p.kv_heads * pages * sizeof(int32_t)));
    for (long i = 0; i < p.kv_heads * pages; i++) table[i] = static_cast<int32_t>(i);
    auto place = [&](long kv_head, long token, long which) {
        char* unit = storage + (kv_head * pages + token / tokens) * memory.unit_bytes;
        return unit + (which * tokens + token % tokens) * bytes;
    };
    for (long h = 0; h < p.kv_heads; h++)
        for (long t = 0; t < before; t++)
            for (long which = 0; which < 2; which++)
                std::memcpy(place(h, t, which), ring.at(0, h, start - before + t, which), bytes);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 16)
    for (long row = 0; row < rows; row++) {
        const float* from = x + row * x_stride;
        const float* cos = p.cos + (start + row) * half;
        const float* sin = p.sin + (start + row) * half;
        alignas(64) float key[256];
        for (long h = 0; h < p.heads; h++) rotate_head(from + h * dim, q + (row * p.heads + h) * dim, cos, sin, dim);
        for (long h = 0; h < p.kv_heads; h++) {
            rotate_head(from + (p.heads + h) * dim, key, cos, sin, dim);
            write_head(key, place(h, before + row, 0), memory.is_bf16, dim);
            write_head(from + (p.heads + p.kv_heads + h) * dim, place(h, before + row, 1), memory.is_bf16, dim);
        }
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    prefill_attention({q, p.heads * dim, storage, memory.unit_bytes, table, pages, tokens, memory.is_bf16, rows,
                       p.heads, p.kv_heads, dim, before, p.window, scale, out, threads});
    const long kept = std::min(rows, p.window);
    for (long h = 0; h < p.kv_heads; h++)
        for (long t = rows - kept; t < rows; t++)
            for (long which = 0; which < 2; which++)
                std::memcpy(ring.at(0, h, start + t, which), place(h, before + t, which), bytes);
}

void window_decode(
    const GdnParams& p, const GdnMemory& memory, const float* x, long x_stride, long rows, const int32_t* slots,
    const int32_t* positions, float* out, int threads) {
    static thread_local Scratch query_memory, length_memory;
    const Ring ring{p, memory};
    const long dim = p.dim, half = dim / 2;
    float* q = query_memory.floats(rows * p.heads * dim);
    int32_t* lengths = static_cast<int32_t*>(length_memory.bytes(rows * sizeof(int32_t)));
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 16)
    for (long row = 0; row < rows; row++) {
        const float* from = x + row * x_stride;
        const float* cos = p.cos + positions[row] * half;
        const float* sin = p.sin + positions[row] * half;
        alignas(64) float key[256];
        lengths[row] = static_cast<int32_t>(std::min<long>(positions[row] + 1L, p.window));
        for (long h = 0; h < p.heads; h++) rotate_head(from + h * dim, q + (row * p.heads + h) * dim, cos, sin, dim);
        for (long h = 0; h < p.kv_heads; h++) {
            rotate_head(from + (p.heads + h) * dim, key, cos, sin, dim);
            write_head(key, ring.at(slots[row], h, positions[row], 0), memory.is_bf16, dim);
            write_head(from + (p.heads + p.kv_heads + h) * dim, ring.at(slots[row], h, positions[row], 1),
                       memory.is_bf16, dim);
        }
    }
    // The ring's order does not matter to softmax.
    decode_attention({q, p.heads * dim, memory.storage, memory.unit_bytes, memory.table + p.state_heads,
                      memory.table_stride, ring.pages(), memory.page_tokens, memory.is_bf16, slots, lengths, rows,
                      p.heads, p.kv_heads, dim, 1.0f / std::sqrt(static_cast<float>(dim)), out, threads});
}

}  // namespace morph
