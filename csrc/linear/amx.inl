// Products of bfloat16 weights with AMX. Half a packed tile (linear/tile.h: 16 vectors of [16 output rows][2 columns])
// is the right operand of a product, and 16 input rows x 32 columns are the left one. All numbers of input
// rows use these products, so a row has the same bits in a batch of any size. The order of sums is that of the
// instruction: per 32 columns the even and the odd columns are summed from zero, and their sum is added to the total.
#pragma once

#include "linear/tile.inl"
#include "vec/amx.h"

namespace headrace::HEADRACE_ISA {

constexpr int kAmxRows = 16;         // input rows of a tile
constexpr int kAmxBlocks = 4;        // most row blocks at once
constexpr int kAmxBytes = 32 << 10;  // of weights: they stay in L1 while all input rows pass

// The shapes of the tiles. A change takes as long as a dozen products.
struct AmxShapes {
    int first = 0, second = 0;  // input rows of tile 4 and of tile 5
};

// Tiles 0 to 3 are sums, 4 and 5 input rows, 6 and 7 weights.
HEADRACE_INLINE void use_shapes(AmxShapes& shapes, int first, int second) {
    if (shapes.first == first && shapes.second == second) return;
    shapes = {first, second};
    TileConfig config{};
    config.palette = 1;
    const int rows[8] = {first, first, second ? second : first, second ? second : first, first, second, 16, 16};
    for (int i = 0; i < 8; ++i) {
        if (rows[i] == 0) continue;
        config.rows[i] = (uint8_t)rows[i];
        config.bytes[i] = 64;
    }
    tiles_configure(config);
}

// The columns of one pass: tiles [first, last) of the row blocks at w, and the same columns of the input rows at x.
struct AmxPass {
    const uint8_t* const* w;
    const uint16_t* x;
    int64_t stride;  // bytes between two input rows
    int first, last;
    bool fresh;  // sums start from zero
};

template <int tile>
HEADRACE_INLINE void begin_sum(bool fresh, const float* sums) {
    if (fresh) {
        tile_zero<tile>();
    } else {
        tile_load<tile>(sums, 64);
    }
}

// One group of at most 16 input rows and `blocks` row blocks; sums[block][rows][16].
template <int blocks>
static void amx_one(const AmxPass& pass, int rows, float* sums) {
    const int size = rows * 16;
    begin_sum<0>(pass.fresh, sums);
    if constexpr (blocks > 1) begin_sum<1>(pass.fresh, sums + size);
    if constexpr (blocks > 2) begin_sum<2>(pass.fresh, sums + 2 * size);
    if constexpr (blocks > 3) begin_sum<3>(pass.fresh, sums + 3 * size);
    for (int half = 2 * pass.first; half < 2 * pass.last; ++half) {
        const int64_t at = (int64_t)half * 1024;
        for (int b = 0; b < blocks; ++b) {
            for (int line = 0; line < 1024; line += 64) prefetch(pass.w[b] + at + line + kPrefetchBytes);
        }
        tile_load<4>(pass.x + (half - 2 * pass.first) * 32, pass.stride);
        tile_load<6>(pass.w[0] + at, 64);
        tile_dot_bf16<0, 4, 6>();
        if constexpr (blocks > 1) tile_load<7>(pass.w[1] + at, 64), tile_dot_bf16<1, 4, 7>();
        if constexpr (blocks > 2) tile_load<6>(pass.w[2] + at, 64), tile_dot_bf16<2, 4, 6>();
        if constexpr (blocks > 3) tile_load<7>(pass.w[3] + at, 64), tile_dot_bf16<3, 4, 7>();
    }
    tile_store<0>(sums, 64);
    if constexpr (blocks > 1) tile_store<1>(sums + size, 64);
    if constexpr (blocks > 2) tile_store<2>(sums + 2 * size, 64);
    if constexpr (blocks > 3) tile_store<3>(sums + 3 * size, 64);
}

// Two groups of input rows, 16 and `rows`, and one row block: sums[16][16] and second[rows][16].
static void amx_two_by_one(const AmxPass& pass, float* sums, float* second) {
    begin_sum<0>(pass.fresh, sums);
    begin_sum<2>(pass.fresh, second);
    const uint8_t *x = (const uint8_t*)pass.x, *other = x + 16 * pass.stride,
                  *w = pass.w[0] + (int64_t)pass.first * 2048;
    for (int i = 0, count = 2 * (pass.last - pass.first); i < count; ++i, x += 64, other += 64, w += 1024) {
        tile_load<6>(w, 64);
        tile_load<4>(x, pass.stride);
        tile_dot_bf16<0, 4, 6>();
        tile_load<5>(other, pass.stride);
        tile_dot_bf16<2, 5, 6>();
    }
    tile_store<0>(sums, 64);
    tile_store<2>(second, 64);
}

// The same with two row blocks; sums[2][16][16] and second[2][rows][16]. A tile is loaded while the product before its
// first one runs.
static void amx_two_by_two(const AmxPass& pass, int rows, float* sums, float* second) {
    begin_sum<0>(pass.fresh, sums);
    begin_sum<1>(pass.fresh, sums + 256);
    begin_sum<2>(pass.fresh, second);
    begin_sum<3>(pass.fresh, second + rows * 16);
    const uint8_t *x = (const uint8_t*)pass.x, *other = x + 16 * pass.stride;
    const uint8_t *w0 = pass.w[0] + (int64_t)pass.first * 2048, *w1 = pass.w[1] + (int64_t)pass.first * 2048;
    tile_load<4>(x, pass.stride);
    tile_load<6>(w0, 64);
    for (int left = 2 * (pass.last - pass.first); left > 0; --left, other += 64, w1 += 1024) {
        tile_load<7>(w1, 64);
        tile_dot_bf16<0, 4, 6>();
        tile_load<5>(other, pass.stride);
        tile_dot_bf16<1, 4, 7>();
        if (left > 1) tile_load<4>(x += 64, pass.stride);
        tile_dot_bf16<2, 5, 6>();
        if (left > 1) tile_load<6>(w0 += 1024, 64);
        tile_dot_bf16<3, 5, 7>();
    }
    tile_store<0>(sums, 64);
    tile_store<1>(sums + 256, 64);
    tile_store<2>(second, 64);
    tile_store<3>(second + rows * 16, 64);
}

// All input rows of a pass, and all of at most four row blocks.
static void amx_pass(const AmxPass& pass, int rows, int blocks, float* sums, AmxShapes& shapes) {
    const int whole = rows / 32, left = rows % 32;
    AmxPass part = pass;
    if (whole > 0) {
        use_shapes(shapes, 16, 16);
        for (int i = 0; i < whole; ++i, part.x += 16 * pass.stride, sums += 2 * blocks * 256) {
            for (int b = 0; b < blocks; b += 2) {
                part.w = pass.w + b;
                float *first = sums + b * 256, *second = first + blocks * 256;
                blocks - b > 1 ? amx_two_by_two(part, 16, first, second) : amx_two_by_one(part, first, second);
            }
        }
    }
    if (left > 16) {
        use_shapes(shapes, 16, left - 16);
        for (int b = 0; b < blocks; b += 2) {
            part.w = pass.w + b;
            float *first = sums + b * 256, *second = sums + blocks * 256 + b * (left - 16) * 16;
            blocks - b > 1 ? amx_two_by_two(part, left - 16, first, second) : amx_two_by_one(part, first, second);
        }
    } else if (left > 0) {
        use_shapes(shapes, left, 0);
        part.w = pass.w;
        blocks == 1   ? amx_one<1>(part, left, sums)
        : blocks == 2 ? amx_one<2>(part, left, sums)
        : blocks == 3 ? amx_one<3>(part, left, sums)
                      : amx_one<4>(part, left, sums);
    }
}

// Joins the sums of segment number `segment` with those of the segments before. `levels`: [kSegmentLevels][floats].
static void join_stored_segment(int segment, float* levels, float* sums, int floats) {
    for (int i = 0; i < floats; i += kLanes) {
        F32v level[kSegmentLevels][1], total[1] = {load_f32(sums + i)};
        for (int l = 0; l < kSegmentLevels; ++l) level[l][0] = load_f32(levels + l * floats + i);
        join_segment<1>(segment, level, total);
        for (int l = 0; l < kSegmentLevels; ++l) store_f32(levels + l * floats + i, level[l][0]);
        store_f32(sums + i, total[0]);
    }
}

// Multiplies `blocks` row blocks at w, at most four, by `rows` input rows, at most kStretchRows. The sums of input rows
// [16 i, 16 i + 16) are at sums + i * blocks * 256 as [block][rows][16]. `levels`: three times as many floats.
static void multiply_amx(const uint8_t* const* w, int blocks, const Segments& segments, const uint16_t* x, int64_t kp,
                         int rows, float* sums, float* levels, AmxShapes& shapes) {
    const int floats = blocks * rows * 16;
    const int step = rows > 32 ? kAmxBytes / (blocks * 2048) : segments.end[segments.count - 1];
    for (int s = 0, tile = segments.begin; s < segments.count; ++s) {
        bool fresh = true;
        if (tile == segments.end[s]) __builtin_memset(sums, 0, sizeof(float) * floats);  // a segment without columns
        for (int last; tile < segments.end[s]; tile = last, fresh = false) {
            last = tile + step_rows(segments.end[s] - tile, step);
            amx_pass({w, x + (tile - segments.begin) * 64, 2 * kp, tile, last, fresh}, rows, blocks, sums, shapes);
        }
        if (segments.count == 1) return;
        join_stored_segment(s, levels, sums, floats);
    }
}

}  // namespace headrace::HEADRACE_ISA
