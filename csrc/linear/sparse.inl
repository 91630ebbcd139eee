// Expands 2:4 quads in registers: the two kept integers at their columns and zeros elsewhere. The products equal those
// of a dense format with the same integers.
#pragma once

#include "linear/tile.h"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

// By pattern: for each of the quad's four columns the index in the kept pair; 0x80: no kept integer.
alignas(32) static constexpr int32_t kSpread[8] = {
    (int32_t)0x80800100, (int32_t)0x80018000, 0x01808000, (int32_t)0x80010080, 0x01800080, 0x01008080, 0, 0};

// Offset of a row's four bytes among sixteen, in each of the four bytes.
alignas(64) static constexpr int32_t kRowBytes[16] = {
    0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c,
    0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c};

// load_quad for 2:4 formats.
template <PackedKind kind, int j>
HEADRACE_INLINE U8v sparse_quad(const uint8_t* group) {
    constexpr Layout layout = layout_of(kind);
    constexpr int vectors = layout.low / 2, pair = j / 2;
    U8v kept = load_u8(group + 64 * (pair % vectors));
    if constexpr (layout.low < 8) kept = field<layout.low, layout.low*(pair / vectors), 0>(kept);
    const U32v patterns = (U32v)load_i32((const int32_t*)(group + 64 * vectors)) >> (4 * j);
    const I32v from = pick(kSpread, (I32v)patterns) | load_i32(kRowBytes) | (j % 2 ? 0x02020202 : 0);
    // Flipping the zero point's bit turns the signed integers into unsigned ones with offset `zero`, and 0 into `zero`.
    const U8v w = lookup(kept, (U8v)from) ^ (uint8_t)layout.zero;
    return layout.wide() ? wide_bytes(w) : w;
}

}  // namespace headrace::HEADRACE_ISA
