// Few rows: a row block's integers are unpacked in registers and multiplied with all the rows at once, one pass over
// the weights.
#pragma once

#include "linear_tile.inl"

// Whether products of all rows take turns, so that none waits for the one before: where registers hold that many sums.
constexpr bool kInterleaved = HEADRACE_IS(avx512);

// `later`: not to be read so soon that it should take room in L1.
template <int bytes, bool later>
HEADRACE_INLINE void fetch(const uint8_t* from) {
    for (int i = 0; i < bytes; i += 64) later ? prefetch_l2(from + i) : prefetch(from + i);
}

// Adds tile `tile` of a row block to the sums of `rows` rows. x: the rows' blocks of that tile. `ahead`: how far from
// the tile lies what is fetched meanwhile.
template <PackedKind kind, int rows>
HEADRACE_INLINE void add_tile(const uint8_t* data, int tile, int part, int64_t ahead, U8v table,
                              const A8Block* const* x, F32v* acc) {
    constexpr Layout layout = layout_of(kind);
    constexpr int group = layout.group(), sub = 32 / group, together = kInterleaved ? rows : 1;
    const uint8_t* block = data + (int64_t)(tile / layout.tiles()) * layout.block_bytes();
    const int inner = tile % layout.tiles();
    const uint8_t* integers = block + layout.header_bytes() + inner * layout.tile_bytes() + part * kPartBytes;
    if (part == 0 && ahead == kPrefetchBytes) {
        if (inner == 0) fetch<layout.header_bytes(), false>(block + ahead);
        fetch<layout.tile_bytes(), false>(integers + ahead);
    } else if (part == 0) {
        if (inner == 0) fetch<layout.header_bytes(), true>(block + ahead);
        fetch<layout.tile_bytes(), true>(integers + ahead);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        U8v w[8];
        load_group<kind>(integers + half * layout.group_bytes(), table, w);
#pragma GCC unroll 2
        for (int s = 0; s < sub; ++s) {
            const int g = (inner * 2 + half) * sub + s;
            const F32v scale = load_scale<kind>(block, g, part);
            F32v min = set_f32(0.0f);
            if constexpr (layout.has_min()) min = load_min<kind>(block, g, part);
#pragma GCC unroll 8
            for (int first = 0; first < rows; first += together) {
                I32v dots[together];
#pragma GCC unroll 8
                for (int i = 0; i < together; ++i) {
                    const A8Block& row = x[first + i][tile];
                    dots[i] = layout.has_min()
                                  ? set_i32(0)
                                  : shift_left(set_i32(negative_sum<group>(row, half, s)), log2_of(layout.zero));
                }
#pragma GCC unroll 8
                for (int j = s * 8 / sub; j < (s + 1) * 8 / sub; ++j) {
#pragma GCC unroll 8
                    for (int i = 0; i < together; ++i) {
                        dots[i] = dot<layout.wide()>(dots[i], w[j], x[first + i][tile].q + half * 32 + 4 * j);
                    }
                }
#pragma GCC unroll 8
                for (int i = 0; i < together; ++i) {
                    const int m = first + i;
                    acc[m] = add_group<group, layout.has_min()>(acc[m], dots[i], scale, min, x[m][tile], half, s);
                }
            }
        }
    }
}

// Row block `data` times `rows` rows of x (each `stride` blocks after the one before) into y[row][16]. As many bytes
// are fetched from data + ahead on.
template <PackedKind kind, int rows>
static void direct(const uint8_t* data, int64_t ahead, const Segments& segments, const A8Block* x, int64_t stride,
                   float* y) {
    const A8Block* row[rows];
    for (int m = 0; m < rows; ++m) row[m] = x + m * stride;
    const U8v table = load_table(kIq4Table);
    for (int part = 0; part < kParts; ++part) {
        F32v acc[rows], level[kSegmentLevels][rows];
        for (int s = 0, tile = 0; s < segments.count; ++s) {
            for (int m = 0; m < rows; ++m) acc[m] = set_f32(0.0f);
            for (; tile < segments.end[s]; ++tile) add_tile<kind, rows>(data, tile, part, ahead, table, row, acc);
            if (segments.count > 1) join_segment<rows>(s, level, acc);
        }
        for (int m = 0; m < rows; ++m) store_f32(y + m * 16 + part * kLanes, acc[m]);
    }
}
