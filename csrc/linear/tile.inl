// Reading tiles: the integers and scales of a group, as vectors of kLanes rows from row `part * kLanes` on.
#pragma once

#include "linear/kernels.h"
#include "linear/sparse.inl"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

constexpr int kParts = 16 / kLanes;  // vectors per row block
constexpr int kPartBytes = 4 * kLanes;
constexpr int kSegmentLevels = 3;
constexpr int kPrefetchBytes = 8192;  // prefetch distance in bytes; fits L1

// Quad j from both planes. `group`: the group's integers at the part. `values`: from group_values.
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

// The sixteen values of a table for load_quad, as wide bytes.
HEADRACE_INLINE U8v load_values(const uint8_t* values) { return wide_bytes(load_table(values)); }

// Loads quads [first, first + count) of a group.
template <PackedKind kind, int first, int count>
HEADRACE_INLINE void load_quads(const uint8_t* group, U8v values, U8v* w) {
    w[0] = load_quad<kind, first>(group, values);
    if constexpr (count > 1) load_quads<kind, first + 1, count - 1>(group, values, w + 1);
}

// The bytes p (tile.h) of sixteen rows for group g of 32 columns. kPoint adds them to the integers; kWidePoint
// subtracts them.
template <PackedKind kind>
HEADRACE_INLINE const uint8_t* points_of(const uint8_t* header, int g) {
    constexpr Layout layout = layout_of(kind);
    return header + 32 * layout.spans() + g * 32 / layout.span * 16;
}

// Row of each byte of a quad vector.
alignas(64) static constexpr uint8_t kRowOfByte[64] = {0,  0,  0,  0,  1,  1,  1,  1,  2,  2,  2,  2,  3,  3,  3,  3,
                                                       4,  4,  4,  4,  5,  5,  5,  5,  6,  6,  6,  6,  7,  7,  7,  7,
                                                       8,  8,  8,  8,  9,  9,  9,  9,  10, 10, 10, 10, 11, 11, 11, 11,
                                                       12, 12, 12, 12, 13, 13, 13, 13, 14, 14, 14, 14, 15, 15, 15, 15};

// The second operand of load_quad for group g of a block: the table (load_values), or for kPoint the byte to add to
// each row's integers.
template <PackedKind kind>
HEADRACE_INLINE U8v group_values(const uint8_t* header, int g, int part, U8v table) {
    if constexpr (!layout_of(kind).point()) return table;
    return lookup(load_table(points_of<kind>(header, g)), load_u8(kRowOfByte + part * kPartBytes));
}

HEADRACE_INLINE F32v half_row(const uint8_t* header, int index, int part) {
    return load_f16((const uint16_t*)header + index * 16 + part * kLanes);
}

// The scale of group g of a block; a group has layout.group() columns.
template <PackedKind kind>
HEADRACE_INLINE F32v load_scale(const uint8_t* header, int g, int part) {
    constexpr Scales scales = layout_of(kind).scales;
    if constexpr (scales == Scales::kZero32 || scales == Scales::kMin32) return half_row(header, g, part);
    if constexpr (scales == Scales::kPoint || scales == Scales::kWidePoint)
        return half_row(header, g * 32 / layout_of(kind).span, part);
    if constexpr (scales == Scales::kRow) return half_row(header, 0, part);
    const F32v d = half_row(header, 0, part);
    if constexpr (scales == Scales::kSuper16 || scales == Scales::kSuperI8) {
        return d * load_i8_f32((const int8_t*)header + 32 + 16 * g + part * kLanes);
    } else if constexpr (scales == Scales::kSuper32) {
        return d * load_u8_f32(header + 64 + 16 * g + part * kLanes);
    } else {
        return d * to_f32(load_u8_i32(header + 64 + 16 * g + part * kLanes) & 15);
    }
}

// The minimum of group g, for formats that have one: it is multiplied with the sum of the inputs.
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

// Adds group s of 32 columns (half `half` of a tile; s is 0 unless groups have 16 columns) to one row's sums, in the
// order of operations of linear/kernels.h.
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

// Minus the sum of x over group s. Times the zero point, it is the initial value of the group's integer sums.
template <int group>
HEADRACE_INLINE int32_t negative_sum(const A8Block& x, int half, int s) {
    return group == 32 ? x.neg_sum32[half] : x.neg_sum16[2 * half + s];
}

// Number of quads of a group that one DotSum can hold: all, or a power of two.
static constexpr int quads_at_once(const Layout& layout) {
    const int all = layout.group() / 4, room = dot_room(layout.wide() && kWideZero ? kWideZero : layout.most());
    return room >= all ? all : room >= 4 ? 4 : room >= 2 ? 2 : 1;
}

// Properties of a format that the kernels for unpacked weights depend on. Formats of one Form share these kernels.
struct Form {
    int group;
    bool has_min;
    bool wide;  // bytes come from wide_bytes, which has subtracted the zero point (kWideZero != 0)
    bool zero;  // integer sums start at -(zero point) * (sum of x)
    int step;   // quads_at_once
};

static constexpr Form form_of(const Layout& layout) {
    const bool wide = layout.wide() && kWideZero != 0;
    return {layout.group(), layout.has_min(), wide, layout.zero != 0 && !wide, quads_at_once(layout)};
}

static constexpr int log2_of(int zero) { return zero <= 1 ? 0 : 1 + log2_of(zero / 2); }

// Joins the sums of 8, 4, 2 or 1 segments pairwise: level[l] holds a sum of 2^l segments. `acc` is the sum of segment
// number `segment`; after the last segment it is the total.
template <int count>
HEADRACE_INLINE void join_segment(int segment, F32v (*level)[count], F32v* acc) {
    int l = 0;
    for (; segment >> l & 1; ++l) {
        for (int i = 0; i < count; ++i) acc[i] = level[l][i] + acc[i];
    }
    if (l == kSegmentLevels) return;
    for (int i = 0; i < count; ++i) level[l][i] = acc[i];
}

// The next piece of a fetch list, or null. Pieces of a page may overlap.
HEADRACE_INLINE const uint8_t* next_piece(FetchList* list, int64_t bytes) {
    if (!list || list->at >= list->count) return nullptr;
    const uint8_t* page = list->base + list->pages[list->at] * list->page_bytes;
    const int64_t last = list->page_bytes - bytes, offset = list->offset < last ? list->offset : last < 0 ? 0 : last;
    list->offset += bytes;
    if (list->offset >= list->page_bytes) list->offset = 0, list->at += list->step;
    return page + offset;
}

// Size of the next of several nearly equal steps that are at most `most` rows: 7 is 4 + 3, not 6 + 1.
static constexpr int step_rows(int left, int most) {
    const int steps = (left + most - 1) / most;
    return (left + steps - 1) / steps;
}

}  // namespace headrace::HEADRACE_ISA
