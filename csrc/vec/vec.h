// The vectors of one instruction set. The build compiles every kernels/*.cpp once per instruction set, with
// HEADRACE_ISA set to plain, avx2, avxvnni, avx512vnni, avx512, neon or i8mm. The code of these files is in `namespace
// headrace::HEADRACE_ISA`.
//
// Rules for these files, because the linker must never use code of one instruction set for another: include nothing of
// the C++ library (only <stdint.h>, <stddef.h>, intrinsics and our plain-data headers), and keep every function static
// or in the namespace above. The objects must have no weak symbols; the build checks them with `nm`.
//
// A shim defines
//   kLanes                        32-bit lanes of a vector: 16, 8 or 4 (a divisor of 16)
//   F32v I32v U32v U8v            kLanes floats, int32, uint32; 4 * kLanes bytes; operators are the compiler's
//   load_f32 store_f32 set_f32 load_f16 load_i8_f32 load_u8_f32 load_u8_i32 load_i32 set_i32 load_u8
//   shift_left(x, n)              x << n, as a vector instruction even if all lanes of x are equal
//   fma(a, b, c) = a * b + c rounded once; max, min, max_i32, sum_i32, to_f32, round_i32 (nearest even), as_f32, as_i32
//   field<bits, from, to>(x)      bits [from, from + bits) of every byte, moved to bit `to`
//   lookup(table, index)          table[index] per byte, within the same sixteen bytes of the vector; 0 from 128 on
//   pick(eight, index)            eight[index % 8] per lane
//   DotSum                        partial sum of byte products for int32 lanes:
//     dot_begin(acc)              an empty sum; it may start from acc if that is free
//     dot_add<wide>(sum, w, a)    sum + sum over i of w[4n + i] * a[i]; a: 4 int8 in [-127, 127]. Not wide: w is
//                                 unsigned, below 128. Wide: w is from wide_bytes(w), the value w - kWideZero
//     dot_end(acc, sum)           acc + the products; acc as passed to dot_begin
//     load_inputs(a)              sixteen int8 for dot_lane: in a register or as a pointer
//     dot_lane<wide, i>(sum, w, inputs)   dot_add with inputs [4 * i, 4 * i + 4)
//   kWideZero                     128 if wide bytes are multiplied as signed bytes, otherwise 0
//   dot_room(most)                number of dot_add that a DotSum can hold, for bytes up to `most`
//   dot_bf16(acc, w, x)           (acc[n] + w[2n + 1] * x[1]) + w[2n] * x[0] on bfloat16 pairs, each sum rounded once
//   load_bf16 store_bf16          kLanes values, widened and rounded to nearest even
//   prefetch(p), prefetch_l2(p)   into L1, or only into L2
//   kTuning                       block sizes that fit the registers and caches
#pragma once

#include <stddef.h>
#include <stdint.h>

#define HEADRACE_PASTE2(a, b) a##b
#define HEADRACE_PASTE(a, b) HEADRACE_PASTE2(a, b)
#define HEADRACE_INLINE static inline __attribute__((always_inline))

// HEADRACE_IS(avx512) is 1 in code compiled for avx512.
#define HEADRACE_CODE_plain 1
#define HEADRACE_CODE_avx2 2
#define HEADRACE_CODE_avxvnni 3
#define HEADRACE_CODE_avx512vnni 4
#define HEADRACE_CODE_avx512 5
#define HEADRACE_CODE_neon 6
#define HEADRACE_CODE_i8mm 7
#define HEADRACE_CODE_soft 5  // avx512 with HEADRACE_SOFT_TILES (vec/amx.h), for tests
#define HEADRACE_IS(name) (HEADRACE_PASTE(HEADRACE_CODE_, HEADRACE_ISA) == HEADRACE_CODE_##name)

namespace headrace::HEADRACE_ISA {

// Block sizes of the kernels. They affect speed and compile time, never a result. Each shim defines them for its
// instruction set; other files must not have such numbers.
struct Tuning {
    int direct_rows;        // most input rows of a direct kernel; each number of rows has its own kernel
    int turn_rows;          // rows of a direct kernel whose integer sums are in registers at once
    int turn_parts;         // vectors of a row block whose integer sums are in registers at once
    bool unpacks;           // direct kernels with more than turn_rows rows unpack a tile once to memory
    int panel_rows;         // input rows of a panel kernel
    int panel_tiles;        // tiles of 64 columns in a panel: 2 KB each plus scales, in L1 together with the rows
    int panels_from;        // smallest number of input rows for which panels are faster
    int by_row_rows;        // input rows of a kernel with one scale a row: times 2 vectors
    int bf16_rows;          // input rows of a bfloat16 kernel: times 2 vectors, times 2 chains
    int attention_rows;     // queries at once
    int attention_pages;    // pages of keys at once: 1, 2 or 4
    int attention_vectors;  // vectors of values at once
    int probe_sums;         // independent sums that hide the latency of one
};

}  // namespace headrace::HEADRACE_ISA

// kLanes for the preprocessor.
#if HEADRACE_IS(avx512) || HEADRACE_IS(avx512vnni)
#define HEADRACE_LANES 16
#include "vec/vec_avx512.h"
#elif HEADRACE_IS(avx2) || HEADRACE_IS(avxvnni)
#define HEADRACE_LANES 8
#include "vec/vec_avx2.h"
#elif HEADRACE_IS(neon) || HEADRACE_IS(i8mm)
#define HEADRACE_LANES 4
#include "vec/vec_neon.h"
#else
#define HEADRACE_LANES 4
#include "vec/vec_plain.h"
#endif

#include "vec/vec_math.h"
