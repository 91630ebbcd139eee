// Packing source rows into tiles, and reading packed rows back.
#pragma once

#include "linear/tile.h"

namespace headrace {

// What a row of the source holds: blocks, or plain floats (optionally quantised on the way).
// The blocks are numbered as in PackedKind, which has all but kF16 and kF32.
enum class SourceKind : int32_t {
    kBf16 = static_cast<int32_t>(PackedKind::kBf16),
    kF16,
    kF32,
    kLast = static_cast<int32_t>(PackedKind::kG8_128)
};

static constexpr bool is_float(SourceKind kind) { return kind >= SourceKind::kBf16 && kind <= SourceKind::kF32; }

struct PackSource {
    const uint8_t* rows;
    int64_t row_bytes;
    SourceKind kind;
    const int32_t* permutation;  // packed row i is source row permutation[i]; null: in order
};

struct PackKernels {
    // Fills row blocks [first, last) of `out` (whose memory is zero). A float source packed as kQ8_0 or kQ4_0 is
    // quantised per 32 columns:
    //   kQ8_0  d = f16(largest |w| / 127), q = round(w / d)
    //   kQ4_0  of the scales d = f16(extreme w / -(7 .. 8.5 in steps of 1/8)) the one whose q = clamp(round(w / d), -8,
    //   7)
    //          leaves the least squared error
    // A float source packed as kBf16 is rounded to nearest even.
    void (*pack)(const PackSource& source, const PackedTensor& out, uint8_t* data, int first, int last);
    // Row `row` as float32 [k], the very values of the source's own dequantisation.
    void (*unpack)(const PackedTensor& tensor, int row, float* out);
};

}  // namespace headrace
