// One decode step of a whole model: the calls that morph/engine/runner.py would make one by one, without leaving C++.
// A step of a small model has hundreds of calls of some ten microseconds; the way through Python costs as much again,
// and every return to it has to wait for the interpreter's lock.

#include "decode_step.h"

#include <algorithm>

#include "gdn.h"

using namespace morph;

extern "C" {
void morph_linear(const float*, long, const void*, int, const float*, float*, long, long, long, long, int);
void morph_rms_norm(const float*, const float*, double, long, long, float*, int);
void morph_add_rms_norm(float*, const float*, const float*, double, long, long, float*, int);
void morph_silu_mul(const float*, long, long, float*, int);
void morph_gate_silu_mul(float*, const float*, long, long, int);
void morph_rope_write_kv(
    float*, long, const float*, const float*, const int32_t*, const float*, const float*, double, char*, int64_t,
    const int32_t*, long, const int32_t*, long, long, int, long, long, long, long, int);
void morph_decode_attention(
    const float*, long, const void*, int64_t, const int32_t*, long, long, long, int, const int32_t*, const int32_t*, long,
    long, long, long, double, float*, int);
void morph_gdn_decode(
    const GdnParams*, const float*, long, long, char*, int64_t, const int32_t*, long, long, int, const int32_t*, float*,
    long, const int32_t*, float*, int);
}

namespace morph {
namespace {

// Rows that one path of one block takes: their inputs, positions and numbers of keys, gathered where not all take it.
struct Rows {
    const float* x;
    const int32_t *slots, *positions, *lens;
    long count;
};

struct Buffers {
    Scratch projected, heads, gate, inner, act, rows, integers;
};

struct Step {
    const DecodeModel& m;
    Buffers& to;

    void linear(const DecodeLinear& w, const float* x, long x_stride, long rows, float* y) {
        morph_linear(x, x_stride, w.weight, m.is_bf16, w.bias, y, w.n, rows, w.n, w.k, m.threads);
    }

    void attention(const DecodeBlock& b, const Rows& r, float* y) {
        const long columns = b.qkv.n, q = m.heads * m.dim;
        float* qkv = to.projected.floats(r.count * columns);
        float* out = to.heads.floats(r.count * q);
        linear(b.qkv, r.x, m.hidden, r.count, qkv);
        morph_rope_write_kv(qkv, columns, m.cos, m.sin, r.positions, b.q_norm, b.k_norm, m.eps, m.storage, m.unit_bytes,
                            b.table, m.table_stride, r.slots, m.max_pages, m.page_tokens, m.is_bf16, r.count, m.heads,
                            m.kv_heads, m.dim, m.threads);
        morph_decode_attention(qkv, columns, m.storage, m.unit_bytes, b.table, m.table_stride, m.max_pages, m.page_tokens,
                               m.is_bf16, r.slots, r.lens, r.count, m.heads, m.kv_heads, m.dim, m.scale, out, m.threads);
        linear(b.out, out, q, r.count, y);
    }

    void ssm(const DecodeBlock& b, const Rows& r, float* y) {
        const long columns = b.ssm_inputs.n, q = m.heads * m.dim;
        float* inputs = to.projected.floats(r.count * columns);
        float* out = to.heads.floats(r.count * q);
        float* z = to.gate.floats(r.count * b.ssm_gate.n);
        linear(b.ssm_inputs, r.x, m.hidden, r.count, inputs);
        morph_gdn_decode(b.gdn, inputs, columns, r.count, m.storage, m.unit_bytes, b.table, m.table_stride, m.page_tokens,
                         m.is_bf16, r.slots, b.conv_tails, m.tail_stride, r.positions, out, m.threads);
        linear(b.ssm_gate, inputs + columns - b.ssm_gate.k, columns, r.count, z);
        morph_gate_silu_mul(out, z, r.count, q, m.threads);
        linear(b.ssm_out, out, q, r.count, y);
    }

    void mlp(const DecodeBlock& b, const float* x, long rows, float* y) {
        float* both = to.inner.floats(rows * b.gate_up.n);
        float* active = to.act.floats(rows * b.down.k);
        linear(b.gate_up, x, m.hidden, rows, both);
        morph_silu_mul(both, rows, b.down.k, active, m.threads);
        linear(b.down, active, b.down.k, rows, y);
    }
};

}  // namespace
}  // namespace morph

// hidden [rows][hidden] holds the embeddings and is overwritten; positions, slots [rows]; paths [blocks][2], attention
// first; logits [rows][head.n].
MORPH_API void morph_decode_step(
    const DecodeModel* model, const DecodePath* paths, long rows, float* hidden, const int32_t* positions,
    const int32_t* slots, float* logits) {
    const DecodeModel& m = *model;
    const long d = m.hidden;
    static thread_local Buffers buffers;
    Step step{m, buffers};
    float* normed = buffers.rows.floats(5 * rows * d);
    float *mixed = normed + rows * d, *pending = mixed + rows * d, *some = pending + rows * d, *result = some + rows * d;
    int32_t* lens = static_cast<int32_t*>(buffers.integers.bytes(3 * rows * sizeof(int32_t)));
    int32_t *some_positions = lens + rows, *some_lens = some_positions + rows;
    for (long r = 0; r < rows; r++) lens[r] = positions[r] + 1;

    for (long block = 0; block < m.num_blocks; block++) {
        const DecodeBlock& b = m.blocks[block];
        if (block == 0)
            morph_rms_norm(hidden, b.input_norm, m.eps, rows, d, normed, m.threads);
        else
            morph_add_rms_norm(hidden, pending, b.input_norm, m.eps, rows, d, normed, m.threads);
        if (b.sums)
            for (long r = 0; r < rows; r++) {
                double* sum = b.sums + slots[r] * m.sums_stride;
                for (long i = 0; i < d; i++) sum[i] += normed[r * d + i];
            }
        for (int which = 0; which < 2; which++) {
            const DecodePath& path = paths[2 * block + which];
            if (!path.count) continue;
            Rows taken{normed, path.slots, positions, lens, path.count};
            float* to = mixed;
            if (path.rows) {
                for (long i = 0; i < path.count; i++) {
                    std::memcpy(some + i * d, normed + path.rows[i] * d, d * sizeof(float));
                    some_positions[i] = positions[path.rows[i]];
                    some_lens[i] = lens[path.rows[i]];
                }
                taken = {some, path.slots, some_positions, some_lens, path.count};
                to = result;
            }
            if (which == 0)
                step.attention(b, taken, to);
            else
                step.ssm(b, taken, to);
            if (path.rows)
                for (long i = 0; i < path.count; i++)
                    std::memcpy(mixed + path.rows[i] * d, result + i * d, d * sizeof(float));
        }
        morph_add_rms_norm(hidden, mixed, b.post_norm, m.eps, rows, d, normed, m.threads);
        step.mlp(b, normed, rows, pending);
    }
    morph_add_rms_norm(hidden, pending, m.norm, m.eps, rows, d, normed, m.threads);
    step.linear(m.head, normed, d, rows, logits);
}
