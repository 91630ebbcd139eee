// Reading tiles: integers of a group and their scales, as vectors of kLanes rows beginning at row `part * kLanes`.
#pragma once

#include "linear/kernels.h"
#include "linear/sparse.inl"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

constexpr int kParts = 16 / kLanes;  // vectors of a row block
constexpr int kPartBytes = 4 * kLanes;
constexpr int kSegmentLevels = 3;
constexpr int kPrefetchBytes = 8192;  // ahead of the reading, little enough for L1

// The two planes' share of quad j, joined. `group`: the group's integers at the part. `values`: group_values.
template <PackedKind kind, int j>
HEADRACE_INLINE U8v load_quad(const uint8_t* group, U8v values) {
    if constexpr (layout_of(kind).sparse) return sparse_quad<kind, j>(group);
    constexpr int low = layout_of(kind).low, high = layout_of(kind).high;
    U8v w = load_u8(group + 64 * (j % low));
    if constexpr (low < 8) w = field<low, low*(j / low), 0>(w);
    if constexpr (high > 0) w = w | field<high, high*(j / high), low>(load_u8(group + 64 * (low + j % high)));
    if constexpr (layout_of(kind).table) return lookup(values, w);
    if constexpr (layout_of(kind).point()) return w + values;
    return layout_of(kind).wide() ? wide_bytes(w) : w;
}

// What load_quad looks wide bytes of table formats up in: a table's sixteen values.
HEADRACE_INLINE U8v load_values(const uint8_t* values) { return wide_bytes(load_table(values)); }

// Quads [first, first + count) of a group.
template <PackedKind kind, int first, int count>
HEADRACE_INLINE void load_quads(const uint8_t* group, U8v values, U8v* w) {
    w[0] = load_quad<kind, first>(group, values);
    if constexpr (count > 1) load_quads<kind, first + 1, count - 1>(group, values, w + 1);
}

// The points of sixteen rows in group g of 32 columns: what is added to their integers, or, of kWidePoint, taken off.
template <PackedKind kind>
HEADRACE_INLINE const uint8_t* points_of(const uint8_t* header, int g) {
    constexpr Layout layout = layout_of(kind);
    return header + 32 * layout.spans() + g * 32 / layout.span * 16;
}

// The row of every byte of a quad.
alignas(64) static constexpr uint8_t kRowOfByte[64] = {0,  0,  0,  0,  1,  1,  1,  1,  2,  2,  2,  2,  3,  3,  3,  3,
                                                       4,  4,  4,  4,  5,  5,  5,  5,  6,  6,  6,  6,  7,  7,  7,  7,
                                                       8,  8,  8,  8,  9,  9,  9,  9,  10, 10, 10, 10, 11, 11, 11, 11,
                                                       12, 12, 12, 12, 13, 13, 13, 13, 14, 14, 14, 14, 15, 15, 15, 15};

// What load_quad wants of group g of a block beside the integers: the table that they are looked up in (load_values),
// or what is added to each row's.
template <PackedKind kind>
HEADRACE_INLINE U8v group_values(const uint8_t* header, int g, int part, U8v table) {
    if constexpr (!layout_of(kind).point()) return table;
    return lookup(load_table(points_of<kind>(header, g)), load_u8(kRowOfByte + part * kPartBytes));
}

HEADRACE_INLINE F32v half_row(const uint8_t* header, int index, int part) {
    return load_f16((const uint16_t*)header + index * 16 + part * kLanes);
}

// The scale of group g of a block (of 16 or of 32 columns, as the format has it).
template <PackedKind kind>
HEADRACE_INLINE F32v load_scale(const uint8_t* header, int g, int part) {
    constexpr Scales scales = layout_of(kind).scales;
    if constexpr (scales == Scales::kZero32 || scales == Scales::kMin32) return half_row(header, g, part);
    if constexpr (scales == Scales::kPoint || scales == Scales::kWidePoint)
        return half_row(header, g * 32 / layout_of(kind).span, part);
    const F32v d = half_row(header, 0, part);
    if constexpr (scales == Scales::kSuper16 || scales == Scales::kSuperI8) {
        return d * load_i8_f32((const int8_t*)header + 32 + 16 * g + part * kLanes);
    } else if constexpr (scales == Scales::kSuper32) {
        return d * load_u8_f32(header + 64 + 16 * g + part * kLanes);
    } else {
        return d * to_f32(load_u8_i32(header + 64 + 16 * g + part * kLanes) & 15);
    }
}

// What is added per column of the group, for the formats that have a minimum.
template <PackedKind kind>
HEADRACE_INLINE F32v load_min(const uint8_t* header, int g, int part) {
    constexpr Scales scales = layout_of(kind).scales;
    if constexpr (scales == Scales::kMin32) {
        return half_row(header, 2 + g, part);
    } else if constexpr (scales == Scales::kSuper32) {
        return -half_row(header, 1, part) * load_u8_f32(header + 192 + 16 * g + part * kLanes);
    } else if constexpr (scales == Scales::kWidePoint) {
        const I32v point = load_u8_i32(points_of<kind>(header, g) + part * kLanes);
        return load_scale<kind>(header, g, part) * to_f32(set_i32(layout_of(kind).zero) - point);
    } else {
        return -half_row(header, 1, part) * to_f32(load_u8_i32(header + 64 + 16 * g + part * kLanes) >> 4);
    }
}

// What group s of 32 columns (half `half` of a tile; s is 0 unless groups are of 16) adds to one row's sums: the order
// of operations that linear_kernels.h states.
template <int group, bool has_min>
HEADRACE_INLINE F32v add_group(F32v acc, I32v dot, F32v scale, F32v min, const A8Block& x, int half, int s) {
    const F32v x_scale = set_f32(x.scale[half]);
    acc = fma(to_f32(dot) * x_scale, scale, acc);
    if constexpr (has_min && group == 32) acc = fma(min, set_f32(x.scaled_sum[half]), acc);
    if constexpr (has_min && group == 16) {
        acc = fma(to_f32(set_i32(-x.neg_sum16[2 * half + s])) * x_scale, min, acc);
    }
    return acc;
}

// Minus the sum of x over group s: the integer sums of the group start at this times the zero point.
template <int group>
HEADRACE_INLINE int32_t negative_sum(const A8Block& x, int half, int s) {
    return group == 32 ? x.neg_sum32[half] : x.neg_sum16[2 * half + s];
}

// Of the vectors of a group, how many are multiplied into one sum: all, or a power of two of them.
static constexpr int quads_at_once(const Layout& layout) {
    const int all = layout.group() / 4, room = dot_room(layout.wide() && kWideZero ? kWideZero : layout.most());
    return room >= all ? all : room >= 4 ? 4 : room >= 2 ? 2 : 1;
}

// How a format's groups are multiplied: what the kernels that read unpacked weights are made for.
struct Form {
    int group;
    bool has_min;
    bool wide;  // bytes from wide_bytes, where these differ: the zero point is off
    bool zero;  // the sums begin at minus the zero point times those of x
    int step;   // quads_at_once
};

static constexpr Form form_of(const Layout& layout) {
    const bool wide = layout.wide() && kWideZero != 0;
    return {layout.group(), layout.has_min(), wide, layout.zero != 0 && !wide, quads_at_once(layout)};
}

static constexpr int log2_of(int zero) { return zero <= 1 ? 0 : 1 + log2_of(zero / 2); }

// Sums of eight segments, joined in pairs as they come: level[l] holds a sum of 2^l segments. `acc` holds the sum of
// segment number `segment`; after the last one, that of all.
template <int count>
HEADRACE_INLINE void join_segment(int segment, F32v (*level)[count], F32v* acc) {
    int l = 0;
    for (; segment >> l & 1; ++l) {
        for (int i = 0; i < count; ++i) acc[i] = level[l][i] + acc[i];
    }
    if (l == kSegmentLevels) return;
    for (int i = 0; i < count; ++i) level[l][i] = acc[i];
}

// The next piece of a list that is to be fetched, or null. Pieces of a page may overlap.
HEADRACE_INLINE const uint8_t* next_piece(FetchList* list, int64_t bytes) {
    if (!list || list->at >= list->count) return nullptr;
    const uint8_t* page = list->base + list->pages[list->at] * list->page_bytes;
    const int64_t last = list->page_bytes - bytes, offset = list->offset < last ? list->offset : last < 0 ? 0 : last;
    list->offset += bytes;
    if (list->offset >= list->page_bytes) list->offset = 0, list->at += list->step;
    return page + offset;
}

// Rows in steps of nearly equal size, none above `most`: 7 is 4 + 3, not 6 + 1.
static constexpr int step_rows(int left, int most) {
    const int steps = (left + most - 1) / most;
    return (left + steps - 1) / steps;
}

}  // namespace headrace::HEADRACE_ISA
