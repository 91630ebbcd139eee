// Products of kC8 weights with inputs of one scale a row (by_row) on AMX. A packed tile is the right operand as it is:
// 16 lines of [16 output rows][4 columns]. 64 columns of an input row (A8Block::q) are a row of the left one. The
// integer sums are exact, so the bits are those of linear/by_row.inl.
#pragma once

#include "linear/amx.inl"

namespace headrace::HEADRACE_ISA {

// Input rows of one pass, and their integer sums.
struct AmxRowPass {
    const uint8_t* const* w;  // row blocks
    const A8Block* x;
    int64_t stride;   // blocks between two input rows
    int first, last;  // tiles of the weights
    int begin;        // Segments::begin
};

// Sums of `groups` groups of input rows (16 and `second`, or `first` alone) and `blocks` row blocks, groups * blocks
// <= 4: dots[group][block][rows][16].
template <int groups, int blocks>
static void amx_dots(const AmxRowPass& pass, int first, int second, int32_t* dots) {
    tile_zero<0>();
    if constexpr (blocks > 1) tile_zero<1>();
    if constexpr (groups > 1 || blocks > 2) tile_zero<2>();
    if constexpr (groups * blocks > 3) tile_zero<3>();
    const int64_t line = pass.stride * (int64_t)sizeof(A8Block);
    for (int tile = pass.first; tile < pass.last; ++tile) {
        const int64_t at = layout_of(PackedKind::kC8).prefix_bytes() + (int64_t)tile * 1024;
        const A8Block* x = pass.x + (tile - pass.begin);
        for (int b = 0; b < blocks && second == 0; ++b) {
            for (int i = 0; i < 1024; i += 64) prefetch(pass.w[b] + at + i + kPrefetchBytes);
        }
        tile_load<4>(x->q, line);
        if constexpr (groups > 1) tile_load<5>(x[16 * pass.stride].q, line);
        tile_load<6>(pass.w[0] + at, 64);
        tile_dot_i8u8<0, 4, 6>();
        if constexpr (groups > 1) tile_dot_i8u8<2, 5, 6>();
        if constexpr (blocks > 1) tile_load<7>(pass.w[1] + at, 64), tile_dot_i8u8<1, 4, 7>();
        if constexpr (groups > 1 && blocks > 1) tile_dot_i8u8<3, 5, 7>();
        if constexpr (groups == 1 && blocks > 2) tile_load<6>(pass.w[2] + at, 64), tile_dot_i8u8<2, 4, 6>();
        if constexpr (groups == 1 && blocks > 3) tile_load<7>(pass.w[3] + at, 64), tile_dot_i8u8<3, 4, 7>();
    }
    const int size = first * 16;
    tile_store<0>(dots, 64);
    if constexpr (blocks > 1) tile_store<1>(dots + size, 64);
    if constexpr (groups > 1) {
        tile_store<2>(dots + blocks * size, 64);
        if constexpr (blocks > 1) tile_store<3>(dots + blocks * size + second * 16, 64);
    } else {
        if constexpr (blocks > 2) tile_store<2>(dots + 2 * size, 64);
        if constexpr (blocks > 3) tile_store<3>(dots + 3 * size, 64);
    }
}

static void amx_dots(const AmxRowPass& pass, int blocks, int first, int second, int32_t* dots) {
    if (second > 0)
        return blocks == 1 ? amx_dots<2, 1>(pass, first, second, dots) : amx_dots<2, 2>(pass, first, second, dots);
    if (blocks == 1) return amx_dots<1, 1>(pass, first, 0, dots);
    if (blocks == 2) return amx_dots<1, 2>(pass, first, 0, dots);
    return blocks == 3 ? amx_dots<1, 3>(pass, first, 0, dots) : amx_dots<1, 4>(pass, first, 0, dots);
}

// Minus the sum of tiles [first, last) of an input row, times the offset of the weights.
HEADRACE_INLINE int32_t amx_offset(const A8Block* x, int first, int last) {
    int32_t sum = 0;
    for (int tile = first; tile < last; ++tile) sum += x[tile].neg_sum32[0] + x[tile].neg_sum32[1];
    return layout_of(PackedKind::kC8).zero * sum;
}

// Multiplies `blocks` row blocks by two groups of input rows (16 and `second`), or by `first` rows alone. Row m of
// group g and block b: sums[g] + (b * rows of the group + m) * 16.
static void amx_by_row(const uint8_t* const* w, int blocks, const Segments& segments, const A8Block* x, int64_t stride,
                       int first, int second, float* const* sums) {
    alignas(64) int32_t dots[4 * 256];
    const int groups = second > 0 ? 2 : 1;
    F32v level[4 * 16 * kParts][kSegmentLevels][1];
    for (int s = 0, tile = segments.begin; s < segments.count; ++s) {
        const int from = tile;
        tile = segments.end[s];
        amx_dots({w, x, stride, from, tile, segments.begin}, blocks, first, second, dots);
        const int32_t* dot = dots;
        for (int g = 0, i = 0; g < groups; ++g) {
            const int rows = g ? second : first;
            for (int b = 0; b < blocks; ++b) {
                for (int m = 0; m < rows; ++m, dot += 16) {
                    const A8Block* row = x + (16 * g + m) * stride;
                    const I32v offset = set_i32(amx_offset(row, from - segments.begin, tile - segments.begin));
                    for (int part = 0; part < kParts; ++part, ++i) {
                        const F32v scaled = to_f32(load_i32(dot + part * kLanes) + offset) * set_f32(row->scale[0]);
                        F32v total[1] = {scaled * half_row(w[b], 0, part)};
                        if (segments.count > 1) join_segment<1>(s, level[i], total);
                        store_f32(sums[g] + (b * rows + m) * 16 + part * kLanes, total[0]);
                    }
                }
            }
        }
    }
}

// Multiplies `blocks` row blocks at w, at most four, by `rows` input rows. The sums of input rows [16 i, 16 i + 16) are
// at sums + i * blocks * 256 as [block][rows][16].
static void multiply_amx_rows(const uint8_t* const* w, int blocks, const Segments& segments, const A8Block* x,
                              int64_t stride, int rows, float* sums, AmxShapes& shapes) {
    for (int row = 0; row < rows; row += 32, sums += 2 * blocks * 256) {
        const int left = rows - row, first = left < 16 ? left : 16, second = left > 32 ? 16 : left > 16 ? left - 16 : 0;
        use_shapes(shapes, first, second);
        const int step = second > 0 ? 2 : 4;
        for (int b = 0; b < blocks; b += step) {
            const int some = blocks - b < step ? blocks - b : step;
            float* to[2] = {sums + b * first * 16, sums + blocks * 256 + b * second * 16};
            amx_by_row(w + b, some, segments, x + row * stride, stride, first, second, to);
        }
    }
}

}  // namespace headrace::HEADRACE_ISA
