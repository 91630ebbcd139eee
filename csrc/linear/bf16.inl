// Kernels for bfloat16 weights and activations. A tile is 32 vectors of column pairs. Even and odd pairs are summed in
// separate chains.
#pragma once

#include "linear/tile.inl"

namespace headrace::HEADRACE_ISA {

// Multiplies `columns` vectors of weights (w[c]: first tile of the row block, at its part) by `rows` rows. The result
// of row m is stored at y[c] + m * y_stride.
template <int rows, int columns>
static void bf16_rows(const uint8_t* const* w, const Segments& segments, const uint16_t* x, int64_t stride,
                      float* const* y, int64_t y_stride) {
    constexpr int count = rows * columns;
    F32v level[kSegmentLevels][count], total[count];
    for (int s = 0, tile = segments.begin; s < segments.count; ++s) {
        F32v even[count], odd[count];
#pragma GCC unroll 12
        for (int i = 0; i < count; ++i) even[i] = odd[i] = set_f32(0.0f);
        for (; tile < segments.end[s]; ++tile) {
            const int64_t at = (int64_t)tile * 2048;
            for (int v = 0; v < 32; v += 2) {
                const uint16_t* pair = x + (tile - segments.begin) * 64 + 2 * v;
                U8v w0[columns], w1[columns];
#pragma GCC unroll 2
                for (int c = 0; c < columns; ++c) {
                    prefetch(w[c] + at + v * 64 + kPrefetchBytes);
                    prefetch(w[c] + at + v * 64 + 64 + kPrefetchBytes);
                    w0[c] = load_u8(w[c] + at + v * 64);
                    w1[c] = load_u8(w[c] + at + v * 64 + 64);
                }
#pragma GCC unroll 6
                for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 2
                    for (int c = 0; c < columns; ++c) {
                        even[m * columns + c] = dot_bf16(even[m * columns + c], w0[c], pair + m * stride);
                        odd[m * columns + c] = dot_bf16(odd[m * columns + c], w1[c], pair + m * stride + 2);
                    }
                }
            }
        }
        for (int i = 0; i < count; ++i) total[i] = even[i] + odd[i];
        if (segments.count > 1) join_segment<count>(s, level, total);
    }
    for (int m = 0; m < rows; ++m) {
        for (int c = 0; c < columns; ++c) store_f32(y[c] + m * y_stride, total[m * columns + c]);
    }
}

using Bf16Kernel = void (*)(const uint8_t* const* w, const Segments& segments, const uint16_t* x, int64_t stride,
                            float* const* y, int64_t y_stride);

// The kernel for `rows` rows, least <= rows <= kTuning.bf16_rows.
template <int columns, int least = 1>
HEADRACE_INLINE Bf16Kernel bf16_kernel(int rows) {
    if constexpr (least < kTuning.bf16_rows) {
        if (rows > least) return bf16_kernel<columns, least + 1>(rows);
    }
    return bf16_rows<least, columns>;
}

// Multiplies row blocks [block, block + blocks), one or two, by `rows` rows; result in y[block][rows][16].
static void bf16_blocks(const PackedTensor& weight, int block, int blocks, const Segments& segments, const uint16_t* x,
                        int64_t stride, int rows, float* y) {
    const uint8_t* w[2 * kParts];
    float* to[2 * kParts];
    const int vectors = blocks * kParts;
    for (int i = 0; i < vectors; ++i) {
        w[i] = weight.data + (block + i / kParts) * weight.stride + i % kParts * kPartBytes;
        to[i] = y + (i / kParts) * rows * 16 + i % kParts * kLanes;
    }
    const bool pairs = vectors % 2 == 0 && rows > 1;
    const Bf16Kernel kernel = pairs ? bf16_kernel<2>(rows) : bf16_kernel<1>(rows);
    for (int i = 0; i < vectors; i += pairs ? 2 : 1) kernel(w + i, segments, x, stride, to + i, 16);
}

}  // namespace headrace::HEADRACE_ISA
