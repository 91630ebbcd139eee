// Few rows: a row block's integers are unpacked in registers and multiplied with all the rows at once, one pass over
// the weights.
#pragma once

#include "linear_tile.inl"

// `later`: not to be read so soon that it should take room in L1.
template <int bytes, bool later>
HEADRACE_INLINE void fetch(const uint8_t* from) {
    for (int i = 0; i < bytes; i += 64) later ? prefetch_l2(from + i) : prefetch(from + i);
}

// Input rows whose integer sums are held at once, of all parts of a row block.
constexpr int kTurnRows = kLanes == 16 ? kDirectRows : 4;

// Quads [quad, end) of 32 columns, all parts, times `rows` rows, which take turns, so that none waits for the one
// before.
template <PackedKind kind, int rows, int quad, int end>
HEADRACE_INLINE void add_quads(const uint8_t* integers, U8v table, const A8Block* const* x, int tile, int half,
                               DotSum (*sums)[rows]) {
    U8v w[kParts];
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) w[p] = load_quad<kind, quad>(integers + p * kPartBytes, table);
#pragma GCC unroll 8
    for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) {
            sums[p][m] = dot_add<layout_of(kind).wide()>(sums[p][m], w[p], x[m][tile].q + half * 32 + 4 * quad);
        }
    }
    if constexpr (quad + 1 < end) add_quads<kind, rows, quad + 1, end>(integers, table, x, tile, half, sums);
}

// The same, with as many quads in a sum as it holds.
template <PackedKind kind, int rows, int quad, int end>
HEADRACE_INLINE void add_dots(const uint8_t* integers, U8v table, const A8Block* const* x, int tile, int half,
                              I32v (*dots)[rows]) {
    constexpr int next = quad + quads_at_once(layout_of(kind));
    DotSum sums[kParts][rows];
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
#pragma GCC unroll 8
        for (int m = 0; m < rows; ++m) sums[p][m] = dot_begin(dots[p][m]);
    }
    add_quads<kind, rows, quad, next>(integers, table, x, tile, half, sums);
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
#pragma GCC unroll 8
        for (int m = 0; m < rows; ++m) dots[p][m] = dot_end(dots[p][m], sums[p][m]);
    }
    if constexpr (next < end) add_dots<kind, rows, next, end>(integers, table, x, tile, half, dots);
}

// Adds group s of the 32 columns `half` of a tile to the sums of rows [first, rows), some at a time.
template <PackedKind kind, int s, int first, int rows>
HEADRACE_INLINE void add_columns(const uint8_t* integers, const F32v* scale, const F32v* min, int tile, int half,
                                 U8v table, const A8Block* const* x, F32v (*acc)[rows]) {
    constexpr Layout layout = layout_of(kind);
    constexpr int group = layout.group(), quads = group / 4, some = step_rows(rows - first, kTurnRows);
    I32v dots[kParts][some];
#pragma GCC unroll 8
    for (int m = 0; m < some; ++m) {
        dots[0][m] = starts_at_zero(layout)
                         ? set_i32(0)
                         : shift_left(set_i32(negative_sum<group>(x[first + m][tile], half, s)), log2_of(layout.zero));
#pragma GCC unroll 4
        for (int p = 1; p < kParts; ++p) dots[p][m] = dots[0][m];
    }
    add_dots<kind, some, s * quads, (s + 1) * quads>(integers, table, x + first, tile, half, dots);
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
#pragma GCC unroll 8
        for (int i = 0; i < some; ++i) {
            const int m = first + i;
            acc[p][m] =
                add_group<group, layout.has_min()>(acc[p][m], dots[p][i], scale[p], min[p], x[m][tile], half, s);
        }
    }
    if constexpr (first + some < rows) {
        add_columns<kind, s, first + some, rows>(integers, scale, min, tile, half, table, x, acc);
    }
}

// Adds group s of 32 columns of a tile. block: the tile's; integers: of the columns.
template <PackedKind kind, int s, int rows>
HEADRACE_INLINE void add_group_of(const uint8_t* block, const uint8_t* integers, int tile, int half, U8v table,
                                  const A8Block* const* x, F32v (*acc)[rows]) {
    constexpr Layout layout = layout_of(kind);
    const int g = (tile % layout.tiles() * 2 + half) * (32 / layout.group()) + s;
    F32v scale[kParts], min[kParts];
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
        scale[p] = load_scale<kind>(block, g, p);
        min[p] = set_f32(0.0f);
        if constexpr (layout.has_min()) min[p] = load_min<kind>(block, g, p);
    }
    add_columns<kind, s, 0, rows>(integers, scale, min, tile, half, table, x, acc);
}

// Adds tile `tile` of a row block to the sums of `rows` rows. x: the rows' blocks. `ahead`: how far from the tile lies
// what is fetched meanwhile.
template <PackedKind kind, int rows>
HEADRACE_INLINE void add_tile(const uint8_t* data, int tile, int64_t ahead, U8v table, const A8Block* const* x,
                              F32v (*acc)[rows]) {
    constexpr Layout layout = layout_of(kind);
    const uint8_t* block = data + (int64_t)(tile / layout.tiles()) * layout.block_bytes();
    const int inner = tile % layout.tiles();
    const uint8_t* integers = block + layout.header_bytes() + inner * layout.tile_bytes();
    if (ahead == kPrefetchBytes) {
        if (inner == 0) fetch<layout.header_bytes(), false>(block + ahead);
        fetch<layout.tile_bytes(), false>(integers + ahead);
    } else {
        if (inner == 0) fetch<layout.header_bytes(), true>(block + ahead);
        fetch<layout.tile_bytes(), true>(integers + ahead);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half, integers += layout.group_bytes()) {
        add_group_of<kind, 0>(block, integers, tile, half, table, x, acc);
        if constexpr (layout.group() == 16) add_group_of<kind, 1>(block, integers, tile, half, table, x, acc);
    }
}

// Row block `data` times `rows` rows of x (each `stride` blocks after the one before) into y[row][16]: one pass over
// the weights, all parts of a tile one after the other. As many bytes are fetched from data + ahead on.
template <PackedKind kind, int rows>
static void direct(const uint8_t* data, int64_t ahead, const Segments& segments, const A8Block* x, int64_t stride,
                   float* y) {
    const A8Block* row[rows];
    for (int m = 0; m < rows; ++m) row[m] = x + m * stride;
    const U8v table = load_iq4_table();
    F32v acc[kParts][rows], level[kParts][kSegmentLevels][rows];
    for (int s = 0, tile = 0; s < segments.count; ++s) {
        for (int part = 0; part < kParts; ++part) {
            for (int m = 0; m < rows; ++m) acc[part][m] = set_f32(0.0f);
        }
        for (; tile < segments.end[s]; ++tile) add_tile<kind, rows>(data, tile, ahead, table, row, acc);
        for (int part = 0; part < kParts && segments.count > 1; ++part) join_segment<rows>(s, level[part], acc[part]);
    }
    for (int part = 0; part < kParts; ++part) {
        for (int m = 0; m < rows; ++m) store_f32(y + m * 16 + part * kLanes, acc[part][m]);
    }
}
