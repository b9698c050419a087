// y = x W^T + bias for many rows in block fixed point (fixed.h), W packed in bf16 as in linear.cpp.
//
// Both operands are rounded to integers once per call: the weight into [panel][block of k][pair of k][32][2], the rows of
// a task into [tile][block of k][12][block], so that a tile reads both from front to back.

#include <algorithm>

#include "fixed.h"
#include "tile.h"

#ifdef MORPH_FIXED
namespace morph {
namespace {

constexpr long BLOCK = FIXED_BLOCK, PAIRS = BLOCK / 2;
constexpr long PANEL_BLOCK = BLOCK * TILE_COLS;  // integers of a block of a panel
constexpr long TILE_BLOCK = BLOCK * TILE_ROWS;   // integers of a block of a tile
constexpr long BLOCKS_IN_L1 = 1;                 // blocks of a panel that meet all tiles of a task before the next
constexpr long TASK_TILES = 16;

struct Job {
    const float* x;
    long x_stride;
    const bf16* weight;
    const float* bias;
    float* y;
    long y_stride;
    long m, n, k;
};

struct Operand {
    int16_t* values;
    float* scales;
};

// One panel of the weight; k beyond the end is zero.
void round_panel(const bf16* panel, long k, int16_t* values, float* scales) {
    for (long at = 0; at < k; at += BLOCK, values += PANEL_BLOCK, scales += TILE_COLS) {
        const long depth = std::min(BLOCK, k - at);
        const bf16* from = panel + at * TILE_COLS;
        vi most0{}, most1{};
        for (long i = 0; i < depth; i++) {
            vu x = load_pairs(from + i * TILE_COLS);
            most0 = grow(most0, even_of(x));
            most1 = grow(most1, odd_of(x));
        }
        const vf top0 = (vf)most0, top1 = (vf)most1;
        store(scales, top0 * (1 / FIXED_WEIGHT));
        store(scales + LANES, top1 * (1 / FIXED_WEIGHT));
        const vf inverse0 = inverse_of(top0, FIXED_WEIGHT);
        const vf inverse1 = inverse_of(top1, FIXED_WEIGHT);
        for (long p = 0; p < PAIRS; p++) {
            vu low{}, high{};
            if (2 * p < depth) low = load_pairs(from + 2 * p * TILE_COLS);
            if (2 * p + 1 < depth) high = load_pairs(from + (2 * p + 1) * TILE_COLS);
            vi pair0 = pair_of(to_int(even_of(low) * inverse0), to_int(even_of(high) * inverse0));
            vi pair1 = pair_of(to_int(odd_of(low) * inverse1), to_int(odd_of(high) * inverse1));
            std::memcpy(values + p * 2 * TILE_COLS, &pair0, 64);
            std::memcpy(values + p * 2 * TILE_COLS + 2 * LANES, &pair1, 64);
        }
    }
}

// A block of `depth` columns of one tile, `live` of its rows there; the rest is zero.
void round_tile(const float* x, long x_stride, long live, long depth, int16_t* values, float* scales) {
    for (long r = 0; r < TILE_ROWS; r++, values += BLOCK) {
        if (r >= live) {
            std::memset(values, 0, BLOCK * sizeof(int16_t));
            scales[r] = 0.0f;
            continue;
        }
        const float* from = x + r * x_stride;
        vf part[BLOCK / LANES];
        vi top{};
#pragma GCC unroll 12
        for (int i = 0; i < BLOCK / LANES; i++) {
            const long left = depth - i * LANES;
            __mmask16 there = left >= LANES ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
            part[i] = (vf)_mm512_maskz_loadu_ps(there, from + i * LANES);
            top = grow(top, part[i]);
        }
        const vf most = (vf)_mm512_set1_epi32(_mm512_reduce_max_epi32((__m512i)top));
        scales[r] = most[0] * (1 / FIXED_ACTIVATION);
        const vf inverse = inverse_of(most, FIXED_ACTIVATION);
#pragma GCC unroll 12
        for (int i = 0; i < BLOCK / LANES; i++) store16(values + i * LANES, to_int(part[i] * inverse));
    }
}

// `blocks` blocks of k of one tile and one panel on top of sum[12][32] (where there is one), to c.
__attribute__((noinline)) void fixed_tile(
    const int16_t* MORPH_RESTRICT a, const float* MORPH_RESTRICT a_scale, const int16_t* MORPH_RESTRICT b,
    const float* MORPH_RESTRICT b_scale, long blocks, bool first, float* sum, float* c, long c_stride) {
    constexpr int R = TILE_ROWS;
    for (long block = 0; block < blocks; block++) {
        vi acc[R][2];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = vi{};
        for (long p = 0; p < PAIRS; p++) {
            vi b0, b1;
            std::memcpy(&b0, b + p * 2 * TILE_COLS, 64);
            std::memcpy(&b1, b + p * 2 * TILE_COLS + 2 * LANES, 64);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                vi s = splat_pair(a + r * BLOCK + 2 * p);
                acc[r][0] = dot_pairs(acc[r][0], b0, s);
                acc[r][1] = dot_pairs(acc[r][1], b1, s);
            }
        }
        const vf scale0 = load(b_scale), scale1 = load(b_scale + LANES);
        const bool last = block + 1 == blocks;
        float* to = last ? c : sum;
        const long stride = last ? c_stride : TILE_COLS;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            vf part0 = from_int(acc[r][0]) * scale0, part1 = from_int(acc[r][1]) * scale1;
            vf before0{}, before1{};
            if (!first) {
                before0 = load(sum + r * TILE_COLS);
                before1 = load(sum + r * TILE_COLS + LANES);
            }
            store(to + r * stride, part0 * a_scale[r] + before0);
            store(to + r * stride + LANES, part1 * a_scale[r] + before1);
        }
        first = false;
        a += TILE_BLOCK;
        a_scale += R;
        b += PANEL_BLOCK;
        b_scale += TILE_COLS;
    }
}

// All of k for the tiles of a task and one panel. The result of tile t goes to sums[t][12][32], or where `y` is given and
// the tile is whole, to its rows there.
void multiply(
    const Operand& a, long tiles, const Operand& weight, long panel, long blocks, float* sums, float* y, long y_stride,
    long whole) {
    for (long at = 0; at < blocks; at += BLOCKS_IN_L1) {
        const long count = std::min(BLOCKS_IN_L1, blocks - at);
        // What comes next is fetched a share per tile, so that no tile waits for it.
        const char* ahead = reinterpret_cast<const char*>(weight.values + (panel * blocks + at + count) * PANEL_BLOCK);
        const long share = ceil_div(PANEL_BLOCK * sizeof(int16_t), 64 * tiles) * 64;
        for (long t = 0; t < tiles; t++, ahead += share) {
            for (long line = 0; line < share; line += 64) __builtin_prefetch(ahead + line);
            float* sum = sums + t * TILE_ROWS * TILE_COLS;
            const bool direct = t < whole && at + count == blocks;
            fixed_tile(a.values + (t * blocks + at) * TILE_BLOCK, a.scales + (t * blocks + at) * TILE_ROWS,
                       weight.values + (panel * blocks + at) * PANEL_BLOCK,
                       weight.scales + (panel * blocks + at) * TILE_COLS, count, at == 0, sum,
                       direct ? y + t * TILE_ROWS * y_stride : sum, direct ? y_stride : TILE_COLS);
        }
    }
}

// Panels [begin, end) of a linear for `rows` rows of A, to y[rows][n].
void panels_of(
    const Operand& a, long rows, const Operand& weight, const float* bias, long n, long blocks, long begin, long end,
    float* y, long y_stride, float* sums) {
    const long tiles = ceil_div(rows, TILE_ROWS);
    for (long panel = begin; panel < end; panel++) {
        const long column = panel * TILE_COLS, cols = std::min<long>(TILE_COLS, n - column);
        const long whole = bias || cols < TILE_COLS ? 0 : rows / TILE_ROWS;
        multiply(a, tiles, weight, panel, blocks, sums, y + column, y_stride, whole);
        for (long r = whole * TILE_ROWS; r < rows; r++)
            for (long j = 0; j < cols; j++)
                y[r * y_stride + column + j] = sums[r * TILE_COLS + j] + (bias ? bias[column + j] : 0.0f);
    }
}

struct Memory {
    Scratch values, scales;
    Operand take(long integers, long scale_count) {
        return {static_cast<int16_t*>(values.bytes(integers * sizeof(int16_t))), scales.floats(scale_count)};
    }
};

Operand weight_memory(Memory& memory, long n, long k) {
    const long panels = ceil_div(n, TILE_COLS), blocks = ceil_div(k, BLOCK);
    return memory.take(panels * blocks * PANEL_BLOCK, panels * blocks * TILE_COLS);
}

Operand rows_memory(Memory& memory, long tiles, long k) {
    const long blocks = ceil_div(k, BLOCK);
    return memory.take(tiles * blocks * TILE_BLOCK, tiles * blocks * TILE_ROWS);
}

// Inside a parallel region.
void round_weight(const bf16* weight, long n, long k, const Operand& to) {
    const long blocks = ceil_div(k, BLOCK);
#pragma omp for schedule(static)
    for (long panel = 0; panel < ceil_div(n, TILE_COLS); panel++)
        round_panel(weight + panel * k * TILE_COLS, k, to.values + panel * blocks * PANEL_BLOCK,
                    to.scales + panel * blocks * TILE_COLS);
}

void round_rows(const float* x, long x_stride, long rows, long k, const Operand& to) {
    const long blocks = ceil_div(k, BLOCK);
    for (long row = 0; row < rows; row += TILE_ROWS) {
        const long tile = row / TILE_ROWS * blocks;
        for (long b = 0; b < blocks; b++)
            round_tile(x + row * x_stride + b * BLOCK, x_stride, std::min<long>(TILE_ROWS, rows - row),
                       std::min(BLOCK, k - b * BLOCK), to.values + (tile + b) * TILE_BLOCK,
                       to.scales + (tile + b) * TILE_ROWS);
    }
}

// Tasks of whole tiles: few rows give each thread one, many rows give tasks whose rows fit in L2.
long task_count(long tiles, int threads) {
    return std::min(tiles, ceil_div(ceil_div(tiles, TASK_TILES), threads) * threads);
}

void linear_fixed(const Job& job, int threads) {
    static thread_local Memory weight_scratch;
    const long panels = ceil_div(job.n, TILE_COLS), blocks = ceil_div(job.k, BLOCK);
    const Operand weight = weight_memory(weight_scratch, job.n, job.k);
    const long tiles = ceil_div(job.m, TILE_ROWS), tasks = task_count(tiles, threads);
    long cuts = threads == 1 ? 1 : std::min(ceil_div(panels, 8), std::max<long>(1, ceil_div(4 * threads, tasks)));
#pragma omp parallel num_threads(threads)
    {
        round_weight(job.weight, job.n, job.k, weight);
#pragma omp for schedule(dynamic, 1)
        for (long item = 0; item < tasks * cuts; item++) {
            static thread_local Memory row_scratch;
            static thread_local Scratch sum_scratch;
            const long part = item / cuts, cut = item % cuts;
            const long first = tiles * part / tasks * TILE_ROWS;
            const long rows = std::min(job.m, tiles * (part + 1) / tasks * TILE_ROWS) - first;
            const Operand a = rows_memory(row_scratch, ceil_div(rows, TILE_ROWS), job.k);
            round_rows(job.x + first * job.x_stride, job.x_stride, rows, job.k, a);
            panels_of(a, rows, weight, job.bias, job.n, blocks, panels * cut / cuts, panels * (cut + 1) / cuts,
                      job.y + first * job.y_stride, job.y_stride,
                      sum_scratch.floats(ceil_div(rows, TILE_ROWS) * TILE_ROWS * TILE_COLS));
        }
    }
}

struct Mlp {
    const float* x;
    long x_stride;
    const bf16 *gate_up, *down;
    float* y;
    long y_stride;
    long m, d, inner, n;
};

// The inner activations of a task never leave L2: they are made a block of k of the second product at a time.
void mlp_task(const Mlp& job, const Operand& gate_up, const Operand& down, long first, long rows) {
    static thread_local Memory row_scratch, inner_scratch;
    static thread_local Scratch memory;
    const long tiles = ceil_div(rows, TILE_ROWS), padded = tiles * TILE_ROWS;
    const long blocks = ceil_div(job.d, BLOCK), inner_blocks = ceil_div(job.inner, BLOCK);
    float* gate = memory.floats(padded * (2 * TILE_COLS + BLOCK));
    float *up = gate + padded * TILE_COLS, *act = up + padded * TILE_COLS;
    const Operand a = rows_memory(row_scratch, tiles, job.d), b = rows_memory(inner_scratch, tiles, job.inner);
    round_rows(job.x + first * job.x_stride, job.x_stride, rows, job.d, a);
    for (long at = 0; at < job.inner; at += BLOCK) {
        const long depth = std::min(BLOCK, job.inner - at);
        for (long column = 0; column < depth; column += TILE_COLS) {
            const long panel = (at + column) / TILE_COLS;
            multiply(a, tiles, gate_up, panel, blocks, gate, nullptr, 0, 0);
            multiply(a, tiles, gate_up, job.inner / TILE_COLS + panel, blocks, up, nullptr, 0, 0);
            for (long r = 0; r < rows; r++)
                for (long j = 0; j < TILE_COLS; j += LANES)
                    store(act + r * BLOCK + column + j,
                          silu(load(gate + r * TILE_COLS + j)) * load(up + r * TILE_COLS + j));
        }
        for (long t = 0; t < tiles; t++) {
            const long to = t * inner_blocks + at / BLOCK;
            round_tile(act + t * TILE_ROWS * BLOCK, BLOCK, std::min<long>(TILE_ROWS, rows - t * TILE_ROWS), depth,
                       b.values + to * TILE_BLOCK, b.scales + to * TILE_ROWS);
        }
    }
    panels_of(b, rows, down, nullptr, job.n, inner_blocks, 0, ceil_div(job.n, TILE_COLS),
              job.y + first * job.y_stride, job.y_stride, gate);
}

void mlp_fixed(const Mlp& job, int threads) {
    static thread_local Memory gate_up_scratch, down_scratch;
    const Operand gate_up = weight_memory(gate_up_scratch, 2 * job.inner, job.d);
    const Operand down = weight_memory(down_scratch, job.n, job.inner);
    const long tiles = ceil_div(job.m, TILE_ROWS), tasks = task_count(tiles, threads);
#pragma omp parallel num_threads(threads)
    {
        round_weight(job.gate_up, 2 * job.inner, job.d, gate_up);
        round_weight(job.down, job.n, job.inner, down);
#pragma omp for schedule(dynamic, 1)
        for (long part = 0; part < tasks; part++) {
            const long first = tiles * part / tasks * TILE_ROWS;
            mlp_task(job, gate_up, down, first, std::min(job.m, tiles * (part + 1) / tasks * TILE_ROWS) - first);
        }
    }
}

}  // namespace
}  // namespace morph
#endif

using namespace morph;

// 1 when this build multiplies in block fixed point.
MORPH_API int morph_has_fixed() {
#ifdef MORPH_FIXED
    return 1;
#else
    return 0;
#endif
}

// y[m][n] = (silu(g) * u) D^T, (g, u) = x[m][d] G^T; G is [2 * inner][d] with the gates first, inner a multiple of 32.
// Strides in elements. Only where `morph_has_fixed`.
MORPH_API void morph_mlp_fixed(
    const float* x, long x_stride, const void* gate_up, const void* down, float* y, long y_stride, long m, long d,
    long inner, long n, int threads) {
#ifdef MORPH_FIXED
    mlp_fixed({x, x_stride, static_cast<const bf16*>(gate_up), static_cast<const bf16*>(down), y, y_stride, m, d, inner, n},
              threads);
#else
    std::abort();
#endif
}

// y[m][n] = x[m][k] W^T + bias, strides in elements; bias may be null. Only where `morph_has_fixed`.
MORPH_API void morph_linear_fixed(
    const float* x, long x_stride, const void* weight, const float* bias, float* y, long y_stride, long m, long n, long k,
    int threads) {
#ifdef MORPH_FIXED
    linear_fixed({x, x_stride, static_cast<const bf16*>(weight), bias, y, y_stride, m, n, k}, threads);
#else
    std::abort();
#endif
}
