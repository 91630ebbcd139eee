// Kernels for weights and inputs with one scale a row (kC8, and A8 of kToken or kTensor). The integers of a segment are
// summed exactly in int32, so their order is free, and the two scales are multiplied once. Two vectors of weights and
// up to kTuning.by_row_rows input rows at once. No panels: the integers need no unpacking.
#pragma once

#include "linear/tile.inl"

namespace headrace::HEADRACE_ISA {

// A row block of weights, and its sums y[rows][16].
struct RowBlock {
    const uint8_t* data;
    int64_t ahead;  // distance to the memory that is prefetched
    float* y;
};

// A vector of weights: the rows of `block` from `part * kLanes` on.
struct RowVector {
    const RowBlock* block;
    int part;
};

// Adds quads [quad, 16) of a tile to the sums of `rows` rows, form.step of them per DotSum. w: the tile's integers at
// their part; x: the tile of each row.
template <Form form, int rows, int columns, int quad = 0>
HEADRACE_INLINE void add_row_quads(const uint8_t* const* w, const A8Block* const* x, I32v (*dots)[columns],
                                   DotSum (*sums)[columns]) {
    if constexpr (quad % form.step == 0) {
#pragma GCC unroll 12
        for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 2
            for (int c = 0; c < columns; ++c) sums[m][c] = dot_begin(dots[m][c]);
        }
    }
    U8v quads[columns];
#pragma GCC unroll 2
    for (int c = 0; c < columns; ++c) quads[c] = load_quad<PackedKind::kC8, quad % 8>(w[c] + quad / 8 * 512, U8v{});
#pragma GCC unroll 12
    for (int m = 0; m < rows; ++m) {
        const Inputs inputs = load_inputs(x[m]->q + quad / 4 * 16);
#pragma GCC unroll 2
        for (int c = 0; c < columns; ++c) sums[m][c] = dot_lane<form.wide, quad % 4>(sums[m][c], quads[c], inputs);
    }
    if constexpr (quad % form.step == form.step - 1) {
#pragma GCC unroll 12
        for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 2
            for (int c = 0; c < columns; ++c) dots[m][c] = dot_end(dots[m][c], sums[m][c]);
        }
    }
    if constexpr (quad + 1 < 16) add_row_quads<form, rows, columns, quad + 1>(w, x, dots, sums);
}

// Prefetches a tile. `later`: it is used too late to keep it in L1, so prefetch to L2.
HEADRACE_INLINE void fetch_integers(const uint8_t* from, bool later) {
    constexpr int bytes = layout_of(PackedKind::kC8).tile_bytes();
    if (later) {
        for (int i = 0; i < bytes; i += 64) prefetch_l2(from + i);
    } else {
        for (int i = 0; i < bytes; i += 64) prefetch(from + i);
    }
}

// Minus the sum of x over tiles [first, last) of a row.
HEADRACE_INLINE int32_t negative_sum(const A8Block* x, int first, int last) {
    int32_t sum = 0;
    for (int tile = first; tile < last; ++tile) sum += x[tile].neg_sum32[0] + x[tile].neg_sum32[1];
    return sum;
}

// Multiplies vectors w[0 .. columns) of weights by `rows` rows of x (`stride` blocks apart).
template <int rows, int columns>
static void add_by_row(const RowVector* w, const Segments& segments, const A8Block* x, int64_t stride) {
    constexpr Layout layout = layout_of(PackedKind::kC8);
    constexpr Form form = form_of(layout);
    constexpr int count = rows * columns, bytes = layout.tile_bytes();
    const uint8_t* integers[columns];
    for (int c = 0; c < columns; ++c) {
        integers[c] = w[c].block->data + layout.prefix_bytes() + w[c].part * kPartBytes;
        if (w[c].part == 0) prefetch(w[c].block->data + w[c].block->ahead);
    }
    const A8Block* row[rows];
    for (int m = 0; m < rows; ++m) row[m] = x + m * stride;
    F32v level[kSegmentLevels][count], total[count];
    for (int s = 0, tile = segments.begin; s < segments.count; ++s) {
        const int first = tile - segments.begin;
        I32v dots[rows][columns];
#pragma GCC unroll 12
        for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 2
            for (int c = 0; c < columns; ++c) dots[m][c] = set_i32(0);
        }
        for (; tile < segments.end[s]; ++tile) {
            const int64_t at = (int64_t)tile * bytes;
#pragma GCC unroll 2
            for (int c = 0; c < columns; ++c) {
                if (w[c].part != 0) continue;
                fetch_integers(integers[c] + at + w[c].block->ahead, w[c].block->ahead != kPrefetchBytes);
            }
            const uint8_t* group[columns];
            for (int c = 0; c < columns; ++c) group[c] = integers[c] + at;
            DotSum sums[rows][columns];
            add_row_quads<form, rows, columns>(group, row, dots, sums);
#pragma GCC unroll 12
            for (int m = 0; m < rows; ++m) ++row[m];
        }
        for (int m = 0; m < rows; ++m) {
            const A8Block* start = x + m * stride;
            const int32_t zero = form.zero ? layout.zero * negative_sum(start, first, tile - segments.begin) : 0;
            for (int c = 0; c < columns; ++c) {
                const F32v scaled = to_f32(dots[m][c] + zero) * set_f32(start->scale[0]);
                total[m * columns + c] = scaled * half_row(w[c].block->data, 0, w[c].part);
            }
        }
        if (segments.count > 1) join_segment<count>(s, level, total);
    }
    for (int m = 0; m < rows; ++m) {
        for (int c = 0; c < columns; ++c)
            store_f32(w[c].block->y + m * 16 + w[c].part * kLanes, total[m * columns + c]);
    }
}

using ByRowKernel = void (*)(const RowVector* w, const Segments& segments, const A8Block* x, int64_t stride);

// The kernel for `rows` rows, least <= rows <= kTuning.by_row_rows.
template <int columns, int least = 1>
HEADRACE_INLINE ByRowKernel by_row_kernel(int rows) {
    if constexpr (least < kTuning.by_row_rows) {
        if (rows > least) return by_row_kernel<columns, least + 1>(rows);
    }
    return add_by_row<least, columns>;
}

// Multiplies `count` row blocks, at most kMostRowBlocks, by `rows` rows of x.
constexpr int kMostRowBlocks = 4;

static void multiply_by_row(const RowBlock* blocks, int count, const Segments& segments, const A8Block* x,
                            int64_t stride, int rows) {
    RowVector vectors[kMostRowBlocks * kParts];
    const int all = count * kParts;
    for (int i = 0; i < all; ++i) vectors[i] = {blocks + i / kParts, i % kParts};
    for (int i = 0; i + 1 < all; i += 2) by_row_kernel<2>(rows)(vectors + i, segments, x, stride);
    if (all % 2) by_row_kernel<1>(rows)(vectors + all - 1, segments, x, stride);
}

}  // namespace headrace::HEADRACE_ISA
