// One instruction set's vectors. The build compiles every kernels/*.cpp once per instruction set, with HEADRACE_ISA
// set to plain, avx2, avxvnni, avx512vnni, avx512, neon or i8mm; what is in such a file lives in `namespace
// headrace::HEADRACE_ISA`.
//
// Rules for these files, so that no code of one instruction set is ever linked into another's path: include nothing of
// the C++ library (only <stdint.h>, <stddef.h>, intrinsics and our plain-data headers), and keep every function in the
// namespace above or static. `nm` must find no weak symbol in the objects.
//
// A shim gives
//   kLanes                        32-bit lanes of a vector: 16, 8 or 4 (a divisor of 16)
//   F32v I32v U32v U8v            kLanes floats, int32, uint32; 4 * kLanes bytes; operators are the compiler's
//   load_f32 store_f32 set_f32 load_f16 load_i8_f32 load_u8_f32 load_u8_i32 load_i32 set_i32 load_u8
//   shift_left(x, n)              x << n, by a vector instruction even where x is one value repeated
//   fma(a, b, c) = a * b + c rounded once; max, min, max_i32, sum_i32, to_f32, round_i32 (nearest even), as_f32, as_i32
//   field<bits, from, to>(x)      bits [from, from + bits) of every byte, moved to bit `to`
//   lookup(table, index)          table[index] per byte, among the same sixteen bytes of the vector; 0 from 128 on
//   pick(eight, index)            eight[index % 8] per lane
//   DotSum                        products of bytes on their way into int32 lanes:
//     dot_begin(acc)              a sum to which products are added; of acc where that costs nothing
//     dot_add<wide>(sum, w, a)    + sum over i of w[4n + i] * a[i]; a: 4 int8 in [-127, 127]; w unsigned, below 128
//     unless
//                                 wide; wide bytes come from wide_bytes(w) and stand for w - kWideZero
//     dot_end(acc, sum)           acc + the products; the same acc as at the beginning
//     load_inputs(a)              sixteen int8 as products take them: in a register, or where they are
//     dot_lane<wide, i>(sum, w, inputs)   dot_add of the four from 4 * i on
//   kWideZero                     128 where wide bytes are multiplied as signed ones, else 0
//   dot_room(most)                how many dot_add of bytes up to `most` a sum holds
//   dot_bf16(acc, w, x)           (acc[n] + w[2n + 1] * x[1]) + w[2n] * x[0] on bfloat16 pairs, each sum rounded once
//   load_bf16 store_bf16          kLanes values, widened and rounded to nearest even
//   prefetch(p), prefetch_l2(p)   into L1, or only as near as L2
//   kTuning                       how much of a kernel fits its registers and caches
#pragma once

#include <stddef.h>
#include <stdint.h>

#define HEADRACE_PASTE2(a, b) a##b
#define HEADRACE_PASTE(a, b) HEADRACE_PASTE2(a, b)
#define HEADRACE_INLINE static inline __attribute__((always_inline))

// Tests on the name: HEADRACE_IS(avx512) is 1 in the files compiled for it.
#define HEADRACE_CODE_plain 1
#define HEADRACE_CODE_avx2 2
#define HEADRACE_CODE_avxvnni 3
#define HEADRACE_CODE_avx512vnni 4
#define HEADRACE_CODE_avx512 5
#define HEADRACE_CODE_neon 6
#define HEADRACE_CODE_i8mm 7
#define HEADRACE_IS(name) (HEADRACE_PASTE(HEADRACE_CODE_, HEADRACE_ISA) == HEADRACE_CODE_##name)

namespace headrace::HEADRACE_ISA {

// Sizes that a kernel holds at once. They decide speed and what is compiled, never a result. All numbers that were
// chosen for one instruction set stand in its shim, in this struct.
struct Tuning {
    int direct_rows;        // most input rows of one direct kernel; each number of rows is a kernel of its own
    int turn_rows;          // of them, rows whose integer sums are held at once
    int turn_parts;         // and vectors of a row block
    bool unpacks;           // whether more rows than a turn has read a tile that was unpacked for them
    int panel_rows;         // input rows that go through a panel together
    int panel_tiles;        // tiles of 64 columns in a panel: 2 KB each and their scales, in L1 with the rows
    int panels_from;        // input rows from which on panels pay
    int bf16_rows;          // input rows of a bfloat16 kernel: times 2 vectors, times 2 chains
    int attention_rows;     // queries at once
    int attention_pages;    // pages of keys at once: 1, 2 or 4
    int attention_vectors;  // vectors of values at once
    int probe_sums;         // sums side by side that hide how long one takes
};

}  // namespace headrace::HEADRACE_ISA

// kLanes, where the preprocessor asks.
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
