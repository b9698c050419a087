// Softmax attention of one sequence's queries over paged keys and values.
#pragma once

#include "pages.h"

namespace morph {

struct Prefill {
    const float* q;  // [rows][heads * dim], row stride q_stride
    long q_stride;
    const char* storage;
    int64_t unit_bytes;
    const int32_t* table_row;  // page p of kv head h is table_row[h * max_pages + p]
    long max_pages, page_tokens;
    int is_bf16;
    long rows, heads, kv_heads, dim;
    long start;   // row i attends to keys (start + i - window, start + i]
    long window;  // 0 = all keys
    float scale;
    float* out;  // [rows][heads * dim]
    int threads;
};

void prefill_attention(const Prefill& job);

struct Decode {
    const float* q;
    long q_stride;
    const char* storage;
    int64_t unit_bytes;
    const int32_t* table;  // row of slot s at table + s * table_stride
    long table_stride;
    long max_pages, page_tokens;
    int is_bf16;
    const int32_t* slots;
    const int32_t* lens;  // keys of each row
    long rows, heads, kv_heads, dim;
    float scale;
    float* out;
    int threads;
};

void decode_attention(const Decode& job);

}  // namespace morph
