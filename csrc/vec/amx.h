// AMX: eight registers (tiles) of 16 rows x 64 bytes, and the product of two of them in bfloat16. A job calls
// tiles_configure before its first tile and tiles_release after its last: other code of the thread may have left other
// shapes. Tile numbers are template arguments, because the instructions name their registers.
//
// With HEADRACE_SOFT_TILES the same functions are plain C++ after Intel's description of the instructions: the tests
// run the kernels that use tiles on CPUs without AMX.
#pragma once

#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

// The 64 bytes that ldtilecfg reads.
struct alignas(64) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];  // of a row
    uint8_t rows[16];
};

#ifdef HEADRACE_SOFT_TILES
struct SoftTile {
    alignas(64) uint8_t bytes[16][64];
};
static thread_local TileConfig soft_config;
static thread_local SoftTile soft_tiles[8];

// As the CPU does, stops the process at a tile that is not configured or at shapes that do not fit.
HEADRACE_INLINE void check_tiles(bool fit) {
    if (!fit) __builtin_trap();
}
HEADRACE_INLINE void tiles_configure(const TileConfig& config) {
    soft_config = config;
    __builtin_memset(soft_tiles, 0, sizeof soft_tiles);
}
HEADRACE_INLINE void tiles_release() { soft_config = {}; }
template <int tile>
HEADRACE_INLINE void tile_zero() {
    check_tiles(soft_config.rows[tile] > 0);
    __builtin_memset(&soft_tiles[tile], 0, sizeof(SoftTile));
}
template <int tile>
HEADRACE_INLINE void tile_load(const void* from, int64_t stride) {
    tile_zero<tile>();
    for (int row = 0; row < soft_config.rows[tile]; ++row)
        __builtin_memcpy(soft_tiles[tile].bytes[row], (const uint8_t*)from + row * stride, soft_config.bytes[tile]);
}
template <int tile>
HEADRACE_INLINE void tile_store(void* to, int64_t stride) {
    check_tiles(soft_config.rows[tile] > 0);
    for (int row = 0; row < soft_config.rows[tile]; ++row)
        __builtin_memcpy((uint8_t*)to + row * stride, soft_tiles[tile].bytes[row], soft_config.bytes[tile]);
}

// Number `at` of four bytes in a row of a tile.
template <class T>
HEADRACE_INLINE T soft_lane(int tile, int row, int at) {
    T value;
    __builtin_memcpy(&value, soft_tiles[tile].bytes[row] + 4 * at, 4);
    return value;
}
HEADRACE_INLINE void check_product(int c, int a, int b) {
    check_tiles(soft_config.rows[c] > 0 && soft_config.rows[c] == soft_config.rows[a] &&
                soft_config.bytes[c] == soft_config.bytes[b] && soft_config.bytes[a] == 4 * soft_config.rows[b]);
}
template <int c, int a, int b>
static void tile_dot_i8u8() {
    check_product(c, a, b);
    for (int m = 0; m < soft_config.rows[c]; ++m) {
        for (int n = 0; n < soft_config.bytes[c] / 4; ++n) {
            int32_t sum = soft_lane<int32_t>(c, m, n);
            for (int k = 0; k < soft_config.bytes[a]; ++k)
                sum += (int8_t)soft_tiles[a].bytes[m][k] * soft_tiles[b].bytes[k / 4][4 * n + k % 4];
            __builtin_memcpy(soft_tiles[c].bytes[m] + 4 * n, &sum, 4);
        }
    }
}

// Zero with the sign of x if x is subnormal.
HEADRACE_INLINE float soft_flush(float x) {
    return x > -__FLT_MIN__ && x < __FLT_MIN__ ? __builtin_copysignf(0.0f, x) : x;
}
HEADRACE_INLINE float soft_half(uint32_t pair, int high) {
    const uint32_t bits = high ? pair & 0xffff0000 : pair << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return soft_flush(value);
}
template <int c, int a, int b>
static void tile_dot_bf16() {
    check_product(c, a, b);
    for (int m = 0; m < soft_config.rows[c]; ++m) {
        for (int n = 0; n < soft_config.bytes[c] / 4; ++n) {
            float sums[2] = {0.0f, 0.0f};
            for (int k = 0; k < soft_config.rows[b]; ++k) {
                const uint32_t x = soft_lane<uint32_t>(a, m, k), w = soft_lane<uint32_t>(b, k, n);
                for (int odd = 0; odd < 2; ++odd)
                    sums[odd] = soft_flush(__builtin_fmaf(soft_half(x, odd), soft_half(w, odd), sums[odd]));
            }
            const float before = soft_flush(soft_lane<float>(c, m, n));
            const float sum = soft_flush(before + soft_flush(sums[0] + sums[1]));
            __builtin_memcpy(soft_tiles[c].bytes[m] + 4 * n, &sum, 4);
        }
    }
}
#else
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

// c[m][n] += sum of a[m][k] * b[k / 4][4n + k % 4] for k = 0..63, with signed bytes of a and unsigned bytes of b, in
// int32. Exact, unless the sum overflows.
template <int c, int a, int b>
HEADRACE_INLINE void tile_dot_i8u8() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

// c[m][n] += (sum of a[m][2k] * b[k][2n]) + (sum of a[m][2k + 1] * b[k][2n + 1]), k = 0..15 in order. Both sums start
// from zero and round once per product; subnormal inputs and results count as 0.
template <int c, int a, int b>
HEADRACE_INLINE void tile_dot_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}
#endif

}  // namespace headrace::HEADRACE_ISA
