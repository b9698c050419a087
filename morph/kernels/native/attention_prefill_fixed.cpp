// Causal flash attention over bf16 unit pages with both products in block fixed point (fixed.h).
//
// As attention_prefill.cpp, but rows of a tile never straddle a key tile of 64, so that a row sees each of them either whole
// or, where its own position lies in it, in part. Whole tiles are rounded to integers: queries and keys by their own
// largest element, values by the largest of a dimension in the tile, weights of a row by its largest in the tile (so that
// small weights keep their precision beside a large one elsewhere). The tile with the row's own position is float32:
// what comes after a row must not touch its rounding.

#include "attention_tile.h"
#include "fixed.h"

#ifdef MORPH_FIXED
namespace morph {
namespace {

constexpr long TASK_ROWS = 384;
constexpr float QUERY = 8191;                 // DIM products of queries and keys
constexpr float WEIGHT = 8191, VALUE = 4095;  // 64 products
constexpr float LOG2_WEIGHT = 12.9998239f;
constexpr long HALF = KEYS / 4;  // keys t and t + 16 of 32 share a pair: that is how two registers of weights are merged

template <long DIM>
constexpr float key_most() {
    return DIM > 64 ? 2047 : 4095;
}
static_assert(64 * QUERY * key_most<64>() < 2147483648.0 && 128 * QUERY * key_most<128>() < 2147483648.0 &&
                  KEYS * WEIGHT * VALUE < 2147483648.0,
              "a block may not overflow");

// Added before rounding to nearest, each value of (-1/2, 1/2) in steps of 1/64 once over 64 keys: many weights below one
// half, beside a large one, are then right in the sum instead of all lost.
struct Dither {
    alignas(64) float offset[KEYS];
    Dither() {
        for (int i = 0; i < KEYS; i++) {
            int reversed = 0;
            for (int bit = 0; bit < 6; bit++) reversed |= (i >> bit & 1) << (5 - bit);
            offset[i] = (reversed + 0.5f) / KEYS - 0.5f;
        }
    }
};
const Dither DITHER;

// WEIGHT 2^x for x <= 0, to an integer. Relative error below 5e-6, finer than the integers; nothing below 2^-24.
MORPH_INLINE vf weight_of(vf x) {
    __m512 v = (__m512)max(x, splat(-24.0f)) + (__m512)splat(LOG2_WEIGHT);
    __m512 r = _mm512_reduce_ps(v, 8);
    vf p = splat(9.58284414e-03f), s = (vf)r;
    p = p * s + 5.59064392e-02f;
    p = p * s + 2.40240989e-01f;
    p = p * s + 6.93124191e-01f;
    p = p * s + 1.0f;
    return (vf)_mm512_scalef_ps((__m512)p, _mm512_sub_ps(v, r));
}

// Keys of a whole tile: [64 / 32][dim / 2][32][2] and a scale per key.
template <long DIM>
void round_keys(const Pages& pages, long first, int16_t* to, float* scales) {
    constexpr float MOST = key_most<DIM>();
    vu raw[DIM / 2];
    for (long t = 0; t < KEYS; t += LANES) {
        vi most{};
        for (long d = 0; d < DIM; d += TILE_COLS) {
            vu* x = raw + d / 2;
#pragma GCC unroll 16
            for (long i = 0; i < LANES; i++) x[i] = load_pairs(pages.key(first + t + i) + d * sizeof(bf16));
            transpose16(x);
            for (long i = 0; i < LANES; i++) most = grow(grow(most, even_of(x[i])), odd_of(x[i]));
        }
        const vf top = (vf)most, inverse = inverse_of(top, MOST);
        store(scales + t, top * (1 / MOST));
        int16_t* panel = to + t / TILE_COLS * DIM * TILE_COLS + t % TILE_COLS * 2;
        for (long i = 0; i < DIM / 2; i++) {
            vi pair = pair_of(to_int(even_of(raw[i]) * inverse), to_int(odd_of(raw[i]) * inverse));
            std::memcpy(panel + i * 2 * TILE_COLS, &pair, 64);
        }
    }
}

// Values of a whole tile: [dim / 32][pair of keys][32][2], the even dimensions first, and a scale per dimension in that
// order.
void round_values(const Pages& pages, long first, int16_t* to, float* scales) {
    for (long d = 0; d < pages.dim; d += TILE_COLS, scales += TILE_COLS, to += KEYS * TILE_COLS) {
        vi most0{}, most1{};
        for (long t = 0; t < KEYS; t++) {
            vu x = load_pairs(pages.value(first + t) + d * sizeof(bf16));
            most0 = grow(most0, even_of(x));
            most1 = grow(most1, odd_of(x));
        }
        const vf top0 = (vf)most0, top1 = (vf)most1;
        const vf inverse0 = inverse_of(top0, VALUE), inverse1 = inverse_of(top1, VALUE);
        store(scales, top0 * (1 / VALUE));
        store(scales + LANES, top1 * (1 / VALUE));
        for (long p = 0; p < KEYS / 2; p++) {
            const long t = p / HALF * 2 * HALF + p % HALF;
            vu x = load_pairs(pages.value(first + t) + d * sizeof(bf16));
            vu y = load_pairs(pages.value(first + t + HALF) + d * sizeof(bf16));
            vi pair0 = pair_of(to_int(even_of(x) * inverse0), to_int(even_of(y) * inverse0));
            vi pair1 = pair_of(to_int(odd_of(x) * inverse1), to_int(odd_of(y) * inverse1));
            std::memcpy(to + p * 2 * TILE_COLS, &pair0, 64);
            std::memcpy(to + p * 2 * TILE_COLS + 2 * LANES, &pair1, 64);
        }
    }
}

typedef vi Sums[TILE_ROWS][2];

// Exact sums over K: rows of K 16-bit integers times a panel of 32 columns.
template <long K>
MORPH_INLINE void dot_tile(const int16_t* MORPH_RESTRICT a, const int16_t* MORPH_RESTRICT b, Sums& acc) {
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) acc[r][0] = acc[r][1] = vi{};
    for (long p = 0; p < K / 2; p++) {
        vi b0, b1;
        std::memcpy(&b0, b + p * 2 * TILE_COLS, 64);
        std::memcpy(&b1, b + p * 2 * TILE_COLS + 2 * LANES, 64);
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; r++) {
            vi s = splat_pair(a + r * K + 2 * p);
            acc[r][0] = dot_pairs(acc[r][0], b0, s);
            acc[r][1] = dot_pairs(acc[r][1], b1, s);
        }
    }
}

// Scores [12][64] of rows of integers, still to be multiplied by each row's own scale.
template <long DIM>
__attribute__((noinline)) void scores_of(
    const int16_t* q, const int16_t* keys, const float* key_scales, float* scores) {
    for (long panel = 0; panel < KEYS / TILE_COLS; panel++) {
        Sums acc;
        dot_tile<DIM>(q, keys + panel * DIM * TILE_COLS, acc);
        const vf scale0 = load(key_scales + panel * TILE_COLS), scale1 = load(key_scales + panel * TILE_COLS + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; r++) {
            store(scores + r * KEYS + panel * TILE_COLS, from_int(acc[r][0]) * scale0);
            store(scores + r * KEYS + panel * TILE_COLS + LANES, from_int(acc[r][1]) * scale1);
        }
    }
}

// Columns [d, d + 32) of 12 rows: out = out * shrink + weights values.
template <long DIM>
__attribute__((noinline)) void add_values(
    const int16_t* weights, const int16_t* values, const float* value_scales, const float* shrink, const float* share,
    float* out, int tall) {
    Sums acc;
    dot_tile<KEYS>(weights, values, acc);
    const vf scale0 = load(value_scales), scale1 = load(value_scales + LANES);
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) {
        if (r >= tall) break;
        float* to = out + r * DIM;
        store(to, load(to) * shrink[r] + from_int(acc[r][0]) * (scale0 * share[r]));
        store(to + LANES, load(to + LANES) * shrink[r] + from_int(acc[r][1]) * (scale1 * share[r]));
    }
}

// 12 rows, `tall` of them live, meet a whole tile of keys.
template <long DIM>
MORPH_INLINE void attend_whole(
    const int16_t* q, const float* q_scales, const int16_t* keys, const float* key_scales,
    const int16_t* values, const float* value_scales, int tall, float* scores, int16_t* weights, RowState* state,
    float* out) {
    constexpr int V = KEYS / LANES;
    scores_of<DIM>(q, keys, key_scales, scores);
    alignas(64) float top[LANES] = {}, before[LANES] = {}, shrink[LANES], share[LANES];
    for (int r = 0; r < tall; r++) {
        vf x[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) x[i] = load(scores + r * KEYS + i * LANES);
        top[r] = max_of(max(max(x[0], x[1]), max(x[2], x[3]))) * q_scales[r];
        before[r] = state[r].max;
    }
    const vf most = max(load(top), load(before));
    store(shrink, exp2(load(before) - most));
    store(share, exp2(load(top) - most) * (1 / WEIGHT));
    for (int r = 0; r < tall; r++) {
        // The tile's largest weight is 1: WEIGHT as an integer.
        vf weight[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; i++)
            weight[i] = weight_of(load(scores + r * KEYS + i * LANES) * q_scales[r] - top[r]);
#pragma GCC unroll 2
        for (int i = 0; i < V; i += 2) {
            vi pairs = pair_of(to_int(weight[i] + load(DITHER.offset + i * LANES)),
                               to_int(weight[i + 1] + load(DITHER.offset + (i + 1) * LANES)));
            std::memcpy(weights + r * KEYS + i * LANES, &pairs, 64);
        }
        const vf total = (weight[0] + weight[1]) + (weight[2] + weight[3]);
        state[r].max = most[r];
        state[r].sum = state[r].sum * shrink[r] + total * share[r];
    }
    for (long d = 0; d < DIM; d += TILE_COLS)
        add_values<DIM>(weights, values + d * KEYS, value_scales + d, shrink, share, out + d, tall);
}

// Calls f(first row, rows, key tile of their positions): tiles of rows whose positions share a key tile.
template <typename F>
MORPH_INLINE void for_segments(long position, long count, long group, F f) {
    for (long at = 0; at < count;) {
        const long tile = (position + at) / KEYS, next = std::min(count, (tile + 1) * KEYS - position);
        for_row_tiles((next - at) * group, [&](long row, int tall) { f(at * group + row, tall, tile * KEYS); });
        at = next;
    }
}

template <long DIM>
void attend(const Prefill& job, long kv_head, long first, long last) {
    static thread_local Scratch float_memory, integer_memory;
    constexpr long dim = DIM;
    const long group = job.heads / job.kv_heads, rows = (last - first) * group;
    const long padded = rows + TILE_ROWS;  // integer tiles are always 12 high
    float* q = float_memory.floats(2 * rows * dim + KEYS * dim + TILE_ROWS * KEYS + padded + KEYS + dim + rows * LANES * 2);
    float* out = q + rows * dim;
    float* keys = out + rows * dim;
    float* scores = keys + KEYS * dim;
    float* q_scales = scores + TILE_ROWS * KEYS;
    float* key_scales = q_scales + ceil_div(padded, LANES) * LANES;
    float* value_scales = key_scales + KEYS;
    static thread_local Scratch state_memory;
    RowState* state = static_cast<RowState*>(state_memory.bytes(rows * sizeof(RowState)));
    int16_t* q_integers = static_cast<int16_t*>(
        integer_memory.bytes((padded * dim + 2 * KEYS * dim + TILE_ROWS * KEYS) * sizeof(int16_t)));
    int16_t* key_integers = q_integers + padded * dim;
    int16_t* value_integers = key_integers + KEYS * dim;
    int16_t* weights = value_integers + KEYS * dim;
    const int32_t* units = job.table_row + kv_head * job.max_pages;
    const Pages pages{job.storage, job.unit_bytes, units, static_cast<uint32_t>(job.page_tokens), dim, sizeof(bf16)};

    const float scale = job.scale * LOG2E;
    std::memset(q_integers + rows * dim, 0, TILE_ROWS * dim * sizeof(int16_t));
    std::memset(weights, 0, TILE_ROWS * KEYS * sizeof(int16_t));
    std::memset(out, 0, rows * dim * sizeof(float));
    for (long r = 0; r < rows; r++) {
        const float* from = job.q + (first + r / group) * job.q_stride + (kv_head * group + r % group) * dim;
        vi most{};
        for (long d = 0; d < dim; d += LANES) {
            vf x = load(from + d) * scale;
            store(q + r * dim + d, x);
            most = grow(most, x);
        }
        const vf top = (vf)_mm512_set1_epi32(_mm512_reduce_max_epi32((__m512i)most)), inverse = inverse_of(top, QUERY);
        q_scales[r] = top[0] * (1 / QUERY);
        for (long d = 0; d < dim; d += LANES) store16(q_integers + r * dim + d, to_int(load(q + r * dim + d) * inverse));
        state[r] = {NONE, vf{}};
    }

    const long begin = job.start + first, end = job.start + last, all_keys = job.start + job.rows;
    for (long tile_at = 0; tile_at < end; tile_at += KEYS) {
        const bool own = tile_at + KEYS > begin;  // some row's own position lies in it
        if (own) transpose_keys<bf16>(pages, tile_at, std::min(KEYS, all_keys - tile_at), keys);
        if (tile_at + KEYS < end) {
            round_keys<DIM>(pages, tile_at, key_integers, key_scales);
            round_values(pages, tile_at, value_integers, value_scales);
        }
        for_segments(begin, last - first, group, [&](long row, int tall, long own_tile) {
            if (own_tile < tile_at) return;
            if (own_tile > tile_at) {
                attend_whole<DIM>(q_integers + row * dim, q_scales + row, key_integers, key_scales, value_integers,
                             value_scales, tall, scores, weights, state + row, out + row * dim);
                return;
            }
            long from[TILE_ROWS] = {}, to[TILE_ROWS];
            for (int r = 0; r < tall; r++) to[r] = begin + (row + r) / group - tile_at + 1;
            attend_tile<bf16>(pages, q + row * dim, keys, tile_at, to[tall - 1], tall, true, from, to, scores, state + row,
                              out + row * dim);
        });
    }

    for (long r = 0; r < rows; r++) {
        float* to = job.out + (first + r / group) * job.heads * dim + (kv_head * group + r % group) * dim;
        finish_row<bf16>(out + r * dim, 1.0f / sum(state[r].sum), dim, to);
    }
}

}  // namespace

void prefill_attention_fixed(const Prefill& job) {
    const long group = job.heads / job.kv_heads;
    long positions = std::max(1L, TASK_ROWS / group);
    while (positions * group > 48 && ceil_div(job.rows, positions) * job.kv_heads < 4 * job.threads) positions /= 2;
    const long blocks = ceil_div(job.rows, positions);
#pragma omp parallel for num_threads(job.threads) schedule(dynamic, 1)
    for (long item = 0; item < blocks * job.kv_heads; item++) {
        long block = blocks - 1 - item / job.kv_heads, head = item % job.kv_heads;
        long first = block * positions;
        const long last = std::min(job.rows, first + positions);
        switch (job.dim) {
            case 32: attend<32>(job, head, first, last); break;
            case 64: attend<64>(job, head, first, last); break;
            case 96: attend<96>(job, head, first, last); break;
            case 128: attend<128>(job, head, first, last); break;
        }
    }
}

}  // namespace morph
#endif

using namespace morph;

// Only where `morph_has_fixed`, for bf16 pages and a dim of 32, 64, 96 or 128.
MORPH_API void morph_prefill_attention_fixed(
    const float* q, long q_stride, const void* storage, int64_t unit_bytes, const int32_t* table_row, long max_pages,
    long page_tokens, long rows, long heads, long kv_heads, long dim, long start, double scale, float* out, int threads) {
#ifdef MORPH_FIXED
    prefill_attention_fixed({q, q_stride, static_cast<const char*>(storage), unit_bytes, table_row, max_pages, page_tokens,
                             1, rows, heads, kv_heads, dim, start, 0, static_cast<float>(scale), out, threads});
#else
    std::abort();
#endif
}
