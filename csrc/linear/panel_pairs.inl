// Panels for products of matrices (i8mm): an instruction multiplies two rows of weights by two input rows over eight
// columns. The panel holds the same bytes as usual, but each two quads of a vector are zipped to eight columns of two
// rows. The integer sums, and so all bits, are those of the dot products.
#pragma once

#include "linear/tile.inl"

namespace headrace::HEADRACE_ISA {

#if HEADRACE_IS(i8mm)
// Zips the eight quads of a group.
HEADRACE_INLINE void zip_group(U8v* w) {
#pragma GCC unroll 4
    for (int j = 0; j < 8; j += 2) zip_quads(w[j], w[j + 1]);
}

// Multiplies quads [quad, end) of a group of 32 columns in the panel, two vectors of each, by `rows` input rows; sums
// in dots, which hold the initial values. The last of an odd number of rows is its own partner.
template <int rows, int quad, int end>
HEADRACE_INLINE void add_panel_pairs(const uint8_t* w, int vector, int half, const A8Block* const* x, I32v (*dots)[2]) {
    constexpr int pairs = (rows + 1) / 2;
    I32v sums[pairs][2][2];  // [pair of input rows][vector][rows 0 and 1, or 2 and 3, of the vector]
#pragma GCC unroll 4
    for (int p = 0; p < pairs; ++p) {
        const int a = 2 * p, b = a + 1 < rows ? a + 1 : a;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[p][i / 2][i % 2] = set_pair(dots[a][0][0], dots[b][0][0]);
    }
#pragma GCC unroll 2
    for (int q = quad; q < end; q += 4) {  // sixteen columns
        PairInputs inputs[pairs];
#pragma GCC unroll 4
        for (int p = 0; p < pairs; ++p) {
            const int a = 2 * p, b = a + 1 < rows ? a + 1 : a;
            inputs[p] = load_pair(x[a]->q + half * 32 + q * 4, x[b]->q + half * 32 + q * 4);
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const int eight = i / 4, c = i / 2 % 2, side = i % 2;
            const U8v part = load_u8(w + (q + 2 * eight + side) * 128 + (vector + c) * kPartBytes);
#pragma GCC unroll 4
            for (int p = 0; p < pairs; ++p) sums[p][c][side] = pair_add(sums[p][c][side], part, inputs[p].half[eight]);
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < pairs; ++p) {
        const int a = 2 * p, b = a + 1 < rows ? a + 1 : a;
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) {
            I32v first, second;
            split_pairs(sums[p][c][0], sums[p][c][1], first, second);
            dots[a][c] = first;
            if (b != a) dots[b][c] = second;
        }
    }
}
#endif

}  // namespace headrace::HEADRACE_ISA
