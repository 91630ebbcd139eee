// AMX: eight registers (tiles) of 16 rows x 64 bytes, and the product of two of them in bfloat16. A job calls
// tiles_configure before its first tile and tiles_release after its last: other code of the thread may have left other
// shapes. Tile numbers are template arguments, because the instructions name their registers.
#pragma once

#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

// The 64 bytes that ldtilecfg reads.
struct alignas(64) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];  // of a row
    uint8_t rows[16];
};

HEADRACE_INLINE void tiles_configure(const TileConfig& config) {
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
}
HEADRACE_INLINE void tiles_release() { __asm__ volatile("tilerelease" : : : "memory"); }

template <int tile>
HEADRACE_INLINE void tile_zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile));
}

// Rows of the tile are `stride` bytes apart.
template <int tile>
HEADRACE_INLINE void tile_load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
HEADRACE_INLINE void tile_store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
}

// c[m][n] += (sum of a[m][2k] * b[k][2n]) + (sum of a[m][2k + 1] * b[k][2n + 1]), k = 0..15 in order. Both sums start
// from zero and round once per product; subnormal inputs and results count as 0.
template <int c, int a, int b>
HEADRACE_INLINE void tile_dot_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

}  // namespace headrace::HEADRACE_ISA
