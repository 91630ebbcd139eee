// 2:4 in registers: two kept integers of a row's quad, where they stand, and zeros for the others. What is multiplied
// is what a dense format of the same integers has.
#pragma once

#include "linear/tile.h"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

// Bytes of a kept pair for a quad's four columns, by pattern; 0x80: neither.
alignas(32) static constexpr int32_t kSpread[8] = {
    (int32_t)0x80800100, (int32_t)0x80018000, 0x01808000, (int32_t)0x80010080, 0x01800080, 0x01008080, 0, 0};

// Where a row's four bytes begin among sixteen, in all four.
alignas(64) static constexpr int32_t kRowBytes[16] = {
    0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c,
    0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c};

// Quad j of a group, as load_quad gives it.
template <PackedKind kind, int j>
HEADRACE_INLINE U8v sparse_quad(const uint8_t* group) {
    constexpr Layout layout = layout_of(kind);
    constexpr int vectors = layout.low / 2, pair = j / 2;
    U8v kept = load_u8(group + 64 * (pair % vectors));
    if constexpr (layout.low < 8) kept = field<layout.low, layout.low*(pair / vectors), 0>(kept);
    const U32v patterns = (U32v)load_i32((const int32_t*)(group + 64 * vectors)) >> (4 * j);
    const I32v from = pick(kSpread, (I32v)patterns) | load_i32(kRowBytes) | (j % 2 ? 0x02020202 : 0);
    // Kept integers are signed: with the bit of the zero point turned they are offset to unsigned, and 0 is the zero.
    const U8v w = lookup(kept, (U8v)from) ^ (uint8_t)layout.zero;
    return layout.wide() ? wide_bytes(w) : w;
}

}  // namespace headrace::HEADRACE_ISA
