// Kernels for few rows: unpack a row block's integers in registers and multiply them with all rows, in one pass over
// the weights.
#pragma once

#include "linear/tile.inl"

namespace headrace::HEADRACE_ISA {

// `later`: the memory is used too late to keep it in L1, so prefetch to L2.
template <int bytes, bool later>
HEADRACE_INLINE void fetch(const uint8_t* from) {
    for (int i = 0; i < bytes; i += 64) later ? prefetch_l2(from + i) : prefetch(from + i);
}

constexpr int kTurnRows = kTuning.turn_rows, kTurnParts = kTuning.turn_parts;

// Source of a tile's integers and scales: the packed block, or an unpacked copy.
template <PackedKind kind>
struct PackedTile {
    const uint8_t *block, *integers;
    int inner;  // number of the tile in the block
    U8v table;
};

struct UnpackedTile {
    U8v w[2 * 8][kParts];
    F32v scale[4][kParts], min[4][kParts];  // [group][part]
};

template <int quad, PackedKind kind>
HEADRACE_INLINE U8v quad_of(const PackedTile<kind>& tile, int half, int part) {
    const uint8_t* integers = tile.integers + half * layout_of(kind).group_bytes();
    return load_quad<kind, quad>(integers + part * kPartBytes,
                                 group_values<kind>(tile.block, tile.inner * 2 + half, part, tile.table));
}
template <int quad>
HEADRACE_INLINE U8v quad_of(const UnpackedTile& tile, int half, int part) {
    return tile.w[8 * half + quad][part];
}

template <PackedKind kind>
HEADRACE_INLINE F32v scale_of(const PackedTile<kind>& tile, int group, int part) {
    return load_scale<kind>(tile.block, tile.inner * (64 / layout_of(kind).group()) + group, part);
}

template <PackedKind kind>
HEADRACE_INLINE F32v min_of(const PackedTile<kind>& tile, int group, int part) {
    return load_min<kind>(tile.block, tile.inner * (64 / layout_of(kind).group()) + group, part);
}

template <PackedKind kind>
HEADRACE_INLINE void unpack_tile(const PackedTile<kind>& from, UnpackedTile& to) {
    constexpr Layout layout = layout_of(kind);
    constexpr int groups = 64 / layout.group();
#pragma GCC unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 1
        for (int part = 0; part < kParts; ++part) {
            const uint8_t* integers = from.integers + half * layout.group_bytes() + part * kPartBytes;
            U8v quads[8];
            const U8v values = group_values<kind>(from.block, from.inner * 2 + half, part, from.table);
            load_quads<kind, 0, 8>(integers, values, quads);
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) to.w[8 * half + j][part] = quads[j];
        }
    }
#pragma GCC unroll 1
    for (int group = 0; group < groups; ++group) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
            to.scale[group][part] = scale_of(from, group, part);
            if constexpr (layout.has_min()) to.min[group][part] = min_of(from, group, part);
        }
    }
}

// Multiplies quads [quad, end) of 32 columns, kTurnParts parts, by block `tile` of each row of x. Interleaving the rows
// keeps the products independent of each other.
template <Form form, int rows, int quad, int end, class From>
HEADRACE_INLINE void add_quads(const From& from, const A8Block* const* x, int tile, int half, int part,
                               DotSum (*sums)[rows]) {
    U8v w[kTurnParts];
#pragma GCC unroll 4
    for (int p = 0; p < kTurnParts; ++p) w[p] = quad_of<quad>(from, half, part + p);
#pragma GCC unroll 8
    for (int m = 0; m < rows; ++m) {
        const Inputs inputs = load_inputs(x[m][tile].q + half * 32 + quad / 4 * 16);
#pragma GCC unroll 4
        for (int p = 0; p < kTurnParts; ++p) sums[p][m] = dot_lane<form.wide, quad % 4>(sums[p][m], w[p], inputs);
    }
    if constexpr (quad + 1 < end) add_quads<form, rows, quad + 1, end>(from, x, tile, half, part, sums);
}

// The same for any number of quads, form.step of them per DotSum.
template <Form form, int rows, int quad, int end, class From>
HEADRACE_INLINE void add_dots(const From& from, const A8Block* const* x, int tile, int half, int part,
                              I32v (*dots)[rows]) {
    constexpr int next = quad + form.step;
    DotSum sums[kTurnParts][rows];
#pragma GCC unroll 4
    for (int p = 0; p < kTurnParts; ++p) {
#pragma GCC unroll 8
        for (int m = 0; m < rows; ++m) sums[p][m] = dot_begin(dots[p][m]);
    }
    add_quads<form, rows, quad, next>(from, x, tile, half, part, sums);
#pragma GCC unroll 4
    for (int p = 0; p < kTurnParts; ++p) {
#pragma GCC unroll 8
        for (int m = 0; m < rows; ++m) dots[p][m] = dot_end(dots[p][m], sums[p][m]);
    }
    if constexpr (next < end) add_dots<form, rows, next, end>(from, x, tile, half, part, dots);
}

// Adds group s of the 32 columns `half` of a tile to the sums of `rows` rows, at most kTurnRows rows at a time, for
// kTurnParts parts from `part` on. `scale`, `min`: [kTurnParts].
template <Form form, int s, int rows, class From>
HEADRACE_INLINE void add_columns(const From& from, const F32v* scale, const F32v* min, int zero_shift,
                                 const A8Block* const* x, int tile, int half, int part, F32v (*acc)[kParts]) {
    constexpr int group = form.group, quads = group / 4, some = step_rows(rows, kTurnRows);
    I32v dots[kTurnParts][some];
#pragma GCC unroll 8
    for (int m = 0; m < some; ++m) {
        dots[0][m] = form.zero ? shift_left(set_i32(negative_sum<group>(x[m][tile], half, s)), zero_shift) : set_i32(0);
#pragma GCC unroll 4
        for (int p = 1; p < kTurnParts; ++p) dots[p][m] = dots[0][m];
    }
    add_dots<form, some, s * quads, (s + 1) * quads>(from, x, tile, half, part, dots);
#pragma GCC unroll 4
    for (int p = 0; p < kTurnParts; ++p) {
#pragma GCC unroll 8
        for (int m = 0; m < some; ++m) {
            F32v& sum = acc[m][part + p];
            const F32v least = form.has_min ? min[p] : set_f32(0.0f);
            sum = add_group<group, form.has_min>(sum, dots[p][m], scale[p], least, x[m][tile], half, s);
        }
    }
    if constexpr (some < rows) {
        add_columns<form, s, rows - some>(from, scale, min, zero_shift, x + some, tile, half, part, acc + some);
    }
}

// Loads the scales of group s of 32 columns and adds the group.
template <Form form, int s, int rows, PackedKind kind>
HEADRACE_INLINE void add_group_of(const PackedTile<kind>& from, int zero_shift, const A8Block* const* x, int tile,
                                  int half, int part, F32v (*acc)[kParts]) {
    F32v scale[kTurnParts], min[kTurnParts];
#pragma GCC unroll 4
    for (int p = 0; p < kTurnParts; ++p) {
        scale[p] = scale_of(from, half * (32 / form.group) + s, part + p);
        if constexpr (form.has_min) min[p] = min_of(from, half * (32 / form.group) + s, part + p);
    }
    add_columns<form, s, rows>(from, scale, min, zero_shift, x, tile, half, part, acc);
}

template <Form form, int s, int rows>
HEADRACE_INLINE void add_group_of(const UnpackedTile& from, int zero_shift, const A8Block* const* x, int tile, int half,
                                  int part, F32v (*acc)[kParts]) {
    const int g = half * (32 / form.group) + s;
    add_columns<form, s, rows>(from, from.scale[g] + part, from.min[g] + part, zero_shift, x, tile, half, part, acc);
}

// Adds tile `tile` of a row block to the sums of `rows` rows.
template <Form form, int rows, class From>
HEADRACE_INLINE void add_tile(const From& from, int zero_shift, const A8Block* const* x, int tile,
                              F32v (*acc)[kParts]) {
#pragma GCC unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 1
        for (int part = 0; part < kParts; part += kTurnParts) {
            add_group_of<form, 0, rows>(from, zero_shift, x, tile, half, part, acc);
            if constexpr (form.group == 16) add_group_of<form, 1, rows>(from, zero_shift, x, tile, half, part, acc);
        }
    }
}

// The same for an unpacked tile. Not inlined: inlining it into the kernels of all formats would take long to compile.
template <Form form, int rows>
static __attribute__((noinline)) void add_unpacked(const UnpackedTile& from, int zero_shift, const A8Block* const* x,
                                                   int tile, F32v (*__restrict acc)[kParts]) {
    add_tile<form, rows>(from, zero_shift, x, tile, acc);
}

// Prefetches a tile: its integers, and the block's header if `begins`.
template <PackedKind kind, bool later>
HEADRACE_INLINE void fetch_tile(const uint8_t* header, const uint8_t* integers, bool begins) {
    if (begins) fetch<layout_of(kind).header_bytes(), later>(header);
    fetch<layout_of(kind).tile_bytes(), later>(integers);
}

// Multiplies row block `data` by `rows` rows of x (`stride` blocks apart); result in y[row][16]. One pass over the
// weights, all parts of a tile one after the other. Prefetches the same number of bytes from data + ahead on.
// `values`: the table of a table format.
template <PackedKind kind, int rows>
static void direct(const uint8_t* data, const uint8_t* values, int64_t ahead, const Segments& segments,
                   const A8Block* x, int64_t stride, float* y) {
    constexpr Layout layout = layout_of(kind);
    constexpr Form form = form_of(layout);
    constexpr int turn = step_rows(rows, kTurnRows), zero_shift = log2_of(layout.zero);
    const A8Block* row[rows];
    for (int m = 0; m < rows; ++m) row[m] = x + m * stride;
    const U8v table = load_values(values);
    F32v acc[rows][kParts], level[kSegmentLevels][rows * kParts];
    for (int s = 0, tile = segments.begin; s < segments.count; ++s) {
        for (int m = 0; m < rows; ++m) {
            for (int part = 0; part < kParts; ++part) acc[m][part] = set_f32(0.0f);
        }
        for (; tile < segments.end[s]; ++tile) {
            const auto [block, integers, inner] = place_of_tile(layout, data, tile);
            if (ahead == kPrefetchBytes) {
                fetch_tile<kind, false>(block + ahead, integers + ahead, inner == 0);
            } else {
                fetch_tile<kind, true>(block + ahead, integers + ahead, inner == 0);
            }
            const PackedTile<kind> packed{block, integers, inner, table};
            // Unpacking a 2:4 tile costs more than writing it to memory and reading it back.
            if constexpr (turn == rows || !(kTuning.unpacks || layout.sparse)) {
                add_tile<form, rows>(packed, zero_shift, row, tile - segments.begin, acc);
            } else {
                UnpackedTile unpacked;
                unpack_tile(packed, unpacked);
                const int column = tile - segments.begin;
                add_unpacked<form, turn>(unpacked, zero_shift, row, column, acc);
                add_unpacked<form, rows - turn>(unpacked, zero_shift, row + turn, column, acc + turn);
            }
        }
        if (segments.count > 1) join_segment<rows * kParts>(s, level, (F32v*)acc);
    }
    for (int m = 0; m < rows; ++m) {
        for (int part = 0; part < kParts; ++part) store_f32(y + m * 16 + part * kLanes, acc[m][part]);
    }
}

}  // namespace headrace::HEADRACE_ISA
