// QK-norm and RoPE on q and k in place, then k and v to their pages.

#include "rope.h"

using namespace morph;

// qkv[rows][(heads + 2 kv_heads) * dim] with a row stride in elements; q_norm and k_norm may be null.
MORPH_API void morph_rope_write_kv(
    float* qkv, long stride, const float* cos, const float* sin, const int32_t* positions, const float* q_norm,
    const float* k_norm, double eps, char* storage, int64_t unit_bytes, const int32_t* table, long table_stride,
    const int32_t* slots, long max_pages, long page_tokens, int is_bf16, long rows, long heads, long kv_heads, long dim,
    int threads) {
    const long item = is_bf16 ? 2 : 4;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 16)
    for (long row = 0; row < rows; row++) {
        float* x = qkv + row * stride;
        const long at = positions[row], page = at / page_tokens, place = at % page_tokens;
        const float* c = cos + at * (dim / 2);
        const float* s = sin + at * (dim / 2);
        for (long h = 0; h < heads + kv_heads; h++) {
            float* head = x + h * dim;
            const float* norm = h < heads ? q_norm : k_norm;
            if (norm) norm_head(head, norm, static_cast<float>(eps), dim);
            rotate_head(head, head, c, s, dim);
        }
        const int32_t* units = table + slots[row] * table_stride;
        for (long h = 0; h < kv_heads; h++) {
            char* unit = storage + units[h * max_pages + page] * unit_bytes;
            write_head(x + (heads + h) * dim, unit + place * dim * item, is_bf16, dim);
            write_head(x + (heads + kv_heads + h) * dim, unit + (page_tokens + place) * dim * item, is_bf16, dim);
        }
    }
}
