// Products with outliers: single columns of packed weights are dequantized and multiplied in float32.
#pragma once

#include "linear/kernels.h"
#include "linear/tile.inl"

namespace headrace::HEADRACE_ISA {

// Integers of column 4j + i of a group for kLanes rows from row `part * kLanes` on, with the offset `zero`.
template <PackedKind kind>
HEADRACE_INLINE I32v column_codes(const uint8_t* group, int j, int i, int part) {
    constexpr Layout layout = layout_of(kind);
    constexpr int low = layout.low, high = layout.high;
    if constexpr (layout.sparse) {
        constexpr int vectors = low / 2;
        int32_t codes[kLanes];
        for (int n = 0; n < kLanes; ++n) {
            const uint8_t *patterns = group + 64 * vectors + 4 * (part * kLanes + n),
                          *row = group + 4 * (part * kLanes + n);
            const int pattern = patterns[j / 2] >> (j % 2 * 4) & 7;
            codes[n] = layout.zero;
            for (int of = 0; of < 2; ++of) {
                const int kept = row[64 * (j / 2 % vectors) + j % 2 * 2 + of] >> (low * (j / 2 / vectors));
                if (kPatterns[pattern][of] == i) codes[n] = (kept & ((1 << low) - 1)) ^ layout.zero;
            }
        }
        return load_i32(codes);
    } else {
        const auto plane = [&](int vector, int shift) {
            return (I32v)((U32v)load_i32((const int32_t*)(group + 64 * vector + part * kPartBytes)) >>
                          (uint32_t)(8 * i + shift));
        };
        I32v codes = plane(j % low, low * (j / low)) & ((1 << low) - 1);
        if constexpr (high > 0) codes = codes | ((plane(low + j % high, high * (j / high)) & ((1 << high) - 1)) << low);
        if constexpr (layout.table) {
            for (int n = 0; n < kLanes; ++n) codes[n] = table_of(kind)[codes[n]];
        }
        return codes;
    }
}

// Column `column` of the row block at `data`, with the same bits as the format's dequantization.
template <PackedKind kind>
HEADRACE_INLINE F32v load_column(const uint8_t* data, int column, int part) {
    constexpr Layout layout = layout_of(kind);
    const int within = column % 32;
    const auto [block, integers, inner] = place_of_tile(layout, data, column / 64);
    const uint8_t* group = integers + column % 64 / 32 * layout.group_bytes();
    const int g = (inner * 64 + column % 64) / layout.group();
    I32v zero = set_i32(layout.zero);
    if constexpr (layout.point() || layout.wide_point()) {
        const I32v point = load_u8_i32(points_of<kind>(block, g) + part * kLanes);
        zero = layout.point() ? zero - point : point;
    }
    const I32v q = column_codes<kind>(group, within / 4, within % 4, part) - zero;
    const F32v product = load_scale<kind>(block, g, part) * to_f32(q);
    if constexpr (layout.has_min() && !layout.wide_point()) return product + load_min<kind>(block, g, part);
    return product;
}

// Adds value * w(column) of a row's outliers, in order, to its sums y[16] of a row block.
template <PackedKind kind>
static void add_outlier_columns(const uint8_t* data, const Outliers& outliers, float* y) {
    for (int part = 0; part < kParts; ++part) {
        F32v sum = load_f32(y + part * kLanes);
        for (int o = 0; o < outliers.count; ++o) {
            sum = fma(set_f32(outliers.value[o]), load_column<kind>(data, outliers.column[o], part), sum);
        }
        store_f32(y + part * kLanes, sum);
    }
}

HEADRACE_INLINE void add_outlier_columns(PackedKind kind, const uint8_t* data, const Outliers& outliers, float* y) {
    switch (kind) {
#define HEADRACE_CASE(kind) \
    case PackedKind::kind:  \
        return add_outlier_columns<PackedKind::kind>(data, outliers, y);
        HEADRACE_INTEGER_KINDS(HEADRACE_CASE)
#undef HEADRACE_CASE
        case PackedKind::kBf16:
            return;
    }
}

// Adds the outliers of input rows [row, row + rows) for row blocks [block, block + blocks) to y[block][rows][16]. The
// result of a row depends on that row alone.
static void add_outliers(const LinearTask& task, const PackedTensor& weight, int block, int blocks, int row, int rows,
                         float* y) {
    if (!task.a8.outliers) return;
    for (int m = 0; m < rows; ++m) {
        const Outliers& outliers = task.a8.outliers[row + m];
        for (int b = 0; outliers.count && b < blocks; ++b) {
            add_outlier_columns(weight.kind, weight.data + (block + b) * weight.stride, outliers,
                                y + (b * rows + m) * 16);
        }
    }
}

}  // namespace headrace::HEADRACE_ISA
