// y = x W^T + bias with float32 x and W packed in float32 or bf16.
//
// Packed weight: [ceil(n / 32)][k][32], columns beyond n are zero. In bf16 the 32 of a row are interleaved (column j at
// 2 j, column 16 + j at 2 j + 1), so that a shift and a mask give two float32 registers.

#include <algorithm>

#include "tile.h"

namespace morph {
namespace {

constexpr long SMALL_ROWS = 96;  // up to here one pass over the weights, straight from x
constexpr long PREFETCH = 2048;  // bytes that a stream of weights is fetched ahead
// Tiles of packed A that stay in L2 while all panels pass. Few: every row of y lies on its own page, and the first level
// of the TLB holds 64.
constexpr long BLOCK_TILES = 60 / TILE_ROWS;
constexpr long BLOCK_BYTES = 768 << 10;

template <typename B>
constexpr long row_bytes() {
    return TILE_COLS * static_cast<long>(sizeof(B));
}

// Rows of a panel that stay in L1 together with as much of an A tile; equal blocks, since short ones are slow.
template <typename B>
MORPH_INLINE long k_block(long k) {
    constexpr long MOST = sizeof(B) == 2 ? 320 : 192;
    return ceil_div(k, ceil_div(k, MOST));
}

template <typename B>
MORPH_INLINE int column_at(int place) {
    if (sizeof(B) == 4) return place;
    return place % 2 ? 16 + place / 2 : place / 2;
}

struct Linear {
    const float* x;
    long x_stride;
    const char* weight;
    const float* bias;
    float* y;
    long y_stride;
    long m, n, k;
};

// Adds the bias and drops the columns beyond n: y[rows x cols] from c[rows x 32].
MORPH_INLINE void finish(const Linear& job, const float* c, long c_stride, long row, long rows, long panel) {
    long first = panel * TILE_COLS, cols = std::min<long>(TILE_COLS, job.n - first);
    for (long r = 0; r < rows; r++) {
        const float* from = c + r * c_stride;
        float* to = job.y + (row + r) * job.y_stride + first;
        if (job.bias) {
            for (long j = 0; j < cols; j++) to[j] = from[j] + job.bias[first + j];
        } else {
            std::memcpy(to, from, cols * sizeof(float));
        }
    }
}

// Few rows: every panel is read once from memory and meets all rows.
template <typename B>
void small_panels(const Linear& job, long begin, long end) {
    alignas(64) float c[SMALL_ROWS * TILE_COLS];
    constexpr long ROW = row_bytes<B>();
    const long tiles = ceil_div(job.m, TILE_ROWS), most = k_block<B>(job.k);
    for (long panel = begin; panel < end; panel++) {
        const char* b = job.weight + panel * job.k * ROW;
        bool direct = (panel + 1) * TILE_COLS <= job.n && !job.bias;
        for (long at = 0; at < job.k; at += most) {
            long depth = std::min(most, job.k - at);
            bool last = at + depth == job.k && direct;
            float* to = last ? job.y + panel * TILE_COLS : c;
            long stride = last ? job.y_stride : TILE_COLS;
            // One tile streams and looks a little ahead; of several, the first two share the fetch of the next block, so
            // that memory does not wait for arithmetic.
            const char* block = b + at * ROW;
            Ahead ahead{block + PREFETCH, ROW};
            if (tiles > 1) ahead = {block + depth * ROW, ROW / 2};
            for_row_tiles(job.m, [&](long first, int rows) {
                const float* a = job.x + first * job.x_stride + at;
                const float* sum = c + first * TILE_COLS;
                float* out = to + first * stride;
                bool stream = tiles == 1 || ahead.at < block + 2 * depth * ROW;
                if (at && stream)
                    tile_of<A::rows, B, true, true>(rows, a, job.x_stride, block, ROW, depth, sum, TILE_COLS, out,
                                                    stride, ahead);
                else if (at)
                    tile_of<A::rows, B, true>(rows, a, job.x_stride, block, ROW, depth, sum, TILE_COLS, out, stride);
                else if (stream)
                    tile_of<A::rows, B, false, true>(rows, a, job.x_stride, block, ROW, depth, sum, TILE_COLS, out,
                                                     stride, ahead);
                else
                    tile_of<A::rows, B, false>(rows, a, job.x_stride, block, ROW, depth, sum, TILE_COLS, out, stride);
                ahead.at += depth * ahead.step;
            });
        }
        if (!direct) finish(job, c, TILE_COLS, 0, job.m, panel);
    }
}

// x rows [row, row + rows) as [block of k][tile][k][TILE_ROWS], zero rows at the end: read from front to back for every
// panel.
void pack_rows(const Linear& job, long row, long rows, long most, float* MORPH_RESTRICT packed) {
    const long tiles = ceil_div(rows, TILE_ROWS);
    for (long at = 0; at < job.k; at += most)
        for (long t = 0; t < tiles; t++) {
            const long depth = std::min(most, job.k - at), live = std::min<long>(TILE_ROWS, rows - t * TILE_ROWS);
            const float* from = job.x + (row + t * TILE_ROWS) * job.x_stride + at;
            float* to = packed + (at * tiles + t * depth) * TILE_ROWS;
            if (live < TILE_ROWS) std::memset(to, 0, depth * TILE_ROWS * sizeof(float));
            long i = 0;
#ifdef MORPH_AVX512
            for (; live == TILE_ROWS && i + 4 <= depth; i += 4) {
                for (long g = 0; g < TILE_ROWS; g += 4) {
                    const float* p = from + g * job.x_stride + i;
                    __m128 a = _mm_loadu_ps(p), b = _mm_loadu_ps(p + job.x_stride);
                    __m128 c = _mm_loadu_ps(p + 2 * job.x_stride), d = _mm_loadu_ps(p + 3 * job.x_stride);
                    _MM_TRANSPOSE4_PS(a, b, c, d);
                    float* q = to + i * TILE_ROWS + g;
                    _mm_storeu_ps(q, a);
                    _mm_storeu_ps(q + TILE_ROWS, b);
                    _mm_storeu_ps(q + 2 * TILE_ROWS, c);
                    _mm_storeu_ps(q + 3 * TILE_ROWS, d);
                }
            }
#endif
            for (; i < depth; i++)
                for (long r = 0; r < live; r++) to[i * TILE_ROWS + r] = from[r * job.x_stride + i];
        }
}

// A block of rows times a range of panels: A packed in L2, a K block of the panel in L1.
template <typename B>
void large_block(const Linear& job, long row, long rows, long panel_begin, long panel_end) {
    static thread_local Scratch packed_memory, sum_memory;
    constexpr long ROW = row_bytes<B>();
    const long tiles = ceil_div(rows, TILE_ROWS), most = k_block<B>(job.k);
    float* packed = packed_memory.floats(tiles * TILE_ROWS * job.k);
    float* sums = sum_memory.floats(tiles * TILE_ROWS * TILE_COLS);
    pack_rows(job, row, rows, most, packed);
    for (long panel = panel_begin; panel < panel_end; panel++) {
        bool direct_panel = (panel + 1) * TILE_COLS <= job.n && !job.bias;
        for (long at = 0; at < job.k; at += most) {
            long depth = std::min(most, job.k - at);
            bool last = at + depth == job.k;
            const char* b = job.weight + (panel * job.k + at) * ROW;
            for (long t = 0; t < tiles; t++) {
                const float* a = packed + (at * tiles + t * depth) * TILE_ROWS;
                float* sum = sums + t * TILE_ROWS * TILE_COLS;
                long first = row + t * TILE_ROWS, live = std::min<long>(TILE_ROWS, rows - t * TILE_ROWS);
                bool direct = last && direct_panel && live == TILE_ROWS;
                float* to = direct ? job.y + first * job.y_stride + panel * TILE_COLS : sum;
                long stride = direct ? job.y_stride : TILE_COLS;
                if (at)
                    tile<TILE_ROWS, A::columns, B, true>(a, TILE_ROWS, b, ROW, depth, sum, TILE_COLS, to, stride);
                else
                    tile<TILE_ROWS, A::columns, B, false>(a, TILE_ROWS, b, ROW, depth, sum, TILE_COLS, to, stride);
                if (last && !direct) finish(job, sum, TILE_COLS, first, live, panel);
            }
        }
    }
}

template <typename B>
void linear(const Linear& job, int threads) {
    long panels = ceil_div(job.n, TILE_COLS);
    if (job.m <= SMALL_ROWS) {
        // Contiguous shares, so that each thread reads one stream.
#pragma omp parallel for num_threads(threads) schedule(static)
        for (long part = 0; part < threads; part++)
            small_panels<B>(job, panels * part / threads, panels * (part + 1) / threads);
        return;
    }
    // Enough blocks of rows to keep all threads busy to the end; where there are few, they are cut over the panels, too.
    long tiles = ceil_div(job.m, TILE_ROWS);
    long most = std::min(BLOCK_TILES, std::max<long>(2, BLOCK_BYTES / (job.k * 4 * TILE_ROWS)));
    long blocks = ceil_div(tiles, most);
    blocks = std::min(tiles, ceil_div(blocks, threads) * threads);
    long cuts = std::min(ceil_div(panels, 16), std::max<long>(1, ceil_div(4 * threads, blocks)));
    if (threads == 1) cuts = 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (long item = 0; item < blocks * cuts; item++) {
        long block = item / cuts, cut = item % cuts;
        long first = tiles * block / blocks * TILE_ROWS;
        long last = std::min(job.m, tiles * (block + 1) / blocks * TILE_ROWS);
        large_block<B>(job, first, last - first, panels * cut / cuts, panels * (cut + 1) / cuts);
    }
}

template <typename B>
void pack(const B* weight, long n, long k, B* packed, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long panel = 0; panel < ceil_div(n, TILE_COLS); panel++) {
        B* to = packed + panel * k * TILE_COLS;
        for (long i = 0; i < k; i++)
            for (int place = 0; place < TILE_COLS; place++) {
                long column = panel * TILE_COLS + column_at<B>(place);
                to[i * TILE_COLS + place] = column < n ? weight[column * k + i] : B{};
            }
    }
}

template <typename B>
MORPH_INLINE const B* row_start(const B* packed, long k, long row, int* place) {
    int column = static_cast<int>(row % TILE_COLS);
    *place = sizeof(B) == 4 ? column : (column < 16 ? 2 * column : 2 * (column - 16) + 1);
    return packed + row / TILE_COLS * k * TILE_COLS;
}

}  // namespace
}  // namespace morph

using namespace morph;

MORPH_API void morph_pack(const void* weight, int is_bf16, long n, long k, void* packed, int threads) {
    if (is_bf16)
        pack(static_cast<const bf16*>(weight), n, k, static_cast<bf16*>(packed), threads);
    else
        pack(static_cast<const float*>(weight), n, k, static_cast<float*>(packed), threads);
}

// Rows `ids` of the weight, float32 [count][k].
MORPH_API void morph_unpack_rows(
    const void* packed, int is_bf16, long k, const int64_t* ids, long count, float* out, int threads) {
#pragma omp parallel for num_threads(threads) if (count > 16)
    for (long i = 0; i < count; i++) {
        int place;
        if (is_bf16) {
            const bf16* from = row_start(static_cast<const bf16*>(packed), k, ids[i], &place);
            for (long j = 0; j < k; j++) out[i * k + j] = to_float(from[j * TILE_COLS + place]);
        } else {
            const float* from = row_start(static_cast<const float*>(packed), k, ids[i], &place);
            for (long j = 0; j < k; j++) out[i * k + j] = from[j * TILE_COLS + place];
        }
    }
}

// The whole weight [n][k] in its own dtype.
MORPH_API void morph_unpack(const void* packed, int is_bf16, long n, long k, void* weight, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < n; row++) {
        int place;
        if (is_bf16) {
            const bf16* from = row_start(static_cast<const bf16*>(packed), k, row, &place);
            for (long j = 0; j < k; j++) static_cast<bf16*>(weight)[row * k + j] = from[j * TILE_COLS + place];
        } else {
            const float* from = row_start(static_cast<const float*>(packed), k, row, &place);
            for (long j = 0; j < k; j++) static_cast<float*>(weight)[row * k + j] = from[j * TILE_COLS + place];
        }
    }
}

// y[m][n] = x[m][k] W^T + bias, strides in elements; bias may be null.
MORPH_API void morph_linear(
    const float* x, long x_stride, const void* weight, int is_bf16, const float* bias, float* y, long y_stride, long m,
    long n, long k, int threads) {
    Linear job{x, x_stride, static_cast<const char*>(weight), bias, y, y_stride, m, n, k};
    if (is_bf16)
        linear<bf16>(job, threads);
    else
        linear<float>(job, threads);
}
