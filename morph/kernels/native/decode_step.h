// What a decode step reads: fixed for a model, its memory and, of the paths, for the members of a batch.
// Mirrored by the structures in native_decode.py.
#pragma once

#include "gdn.h"

namespace morph {

struct DecodeLinear {
    const void* weight;  // packed; null where the block has no such mixer
    const float* bias;   // or null
    int64_t n, k;
};

struct DecodeBlock {
    const float *input_norm, *post_norm, *q_norm, *k_norm;  // the last two null without QK-norm
    DecodeLinear qkv, out;                                  // attention
    DecodeLinear ssm_inputs, ssm_gate, ssm_out;
    const GdnParams* gdn;
    DecodeLinear gate_up, down;  // MLP
    const int32_t* table;        // this block's row of slot 0
    float* conv_tails;           // of slot 0
    double* sums;                // of slot 0, or null where no gate will read them
};

struct DecodeModel {
    const DecodeBlock* blocks;
    const float* norm;
    DecodeLinear head;
    const float *cos, *sin;
    char* storage;
    int64_t num_blocks, hidden, heads, kv_heads, dim, max_pages, page_tokens, unit_bytes;
    int64_t table_stride, tail_stride, sums_stride;  // elements from one slot to the next
    double eps, scale;
    int32_t is_bf16, threads;
};

struct DecodePath {
    const int32_t *rows, *slots;  // rows is null where all rows take the path
    int64_t count;
};

}  // namespace morph
