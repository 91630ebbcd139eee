// Kernels that pack source rows into tiles and unpack single rows.
#pragma once

#include "linear/tile.h"

namespace headrace {

// Format of a source row: blocks or floats. Block formats have the numbers of PackedKind, which lacks kF16 and kF32.
enum class SourceKind : int32_t {
    kBf16 = static_cast<int32_t>(PackedKind::kBf16),
    kF16,
    kF32,
    kLast = static_cast<int32_t>(PackedKind::kC8)
};

static constexpr bool is_float(SourceKind kind) { return kind >= SourceKind::kBf16 && kind <= SourceKind::kF32; }

struct PackSource {
    const uint8_t* rows;
    int64_t row_bytes;
    SourceKind kind;
    const int32_t* permutation;  // packed row i is source row permutation[i]; null: same order
};

struct PackKernels {
    // Packs row blocks [first, last) of `out` to `data`, which must be zero. A float source packed as kQ8_0 or kQ4_0 is
    // quantized per 32 columns:
    //   kQ8_0  d = f16(largest |w| / 127), q = round(w / d)
    //   kQ4_0  d = f16(w of largest |w| / -s), q = clamp(round(w / d), -8, 7), for the s of 7, 7.125 .. 8.5 with the
    //          smallest squared error
    // A float source packed as kBf16 is rounded to nearest even.
    void (*pack)(const PackSource& source, const PackedTensor& out, uint8_t* data, int first, int last);
    // Unpacks row `row` to float32 [k], with the same bits as dequantizing the source.
    void (*unpack)(const PackedTensor& tensor, int row, float* out);
};

}  // namespace headrace
