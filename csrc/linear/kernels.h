// Kernels for linear layers: y[m][n] = sum over k of x[m][k] * w[n][k]; x is A8 (integer weights) or bfloat16 (kBf16
// weights).
//
// Row-invariant: element (m, n) is the result of one fixed sequence of float operations. It does not depend on the
// other rows, on how the work is cut, or on the instruction set (except for bfloat16 subnormals). Per group of columns,
// in order of k:
//   acc = fma(float(integer dot) * x.scale, w.scale, acc);  with a minimum also  acc = fma(w.min, x.scaled_sum, acc)
// The integer dot is exact: the zero point is subtracted in integers. Groups of 16 use the x.scale of their 32 columns.
// kC8 and inputs with one scale a row (`by_row`): per segment  (float(integer dot) * x.scale) * w.scale, with the dot
// of all its columns. kBf16: two chains, even and odd pairs of columns, added at the end. On AMX another order
// (linear/amx.inl).
#pragma once

#include "linear/quantize_act_kernels.h"
#include "linear/tile.h"

namespace headrace {

constexpr int kSegments = 8;

// Segments of the sum over k. A layer that tensor parallelism cuts along k has eight; each is summed from zero, and
// they are joined as ((0+1)+(2+3))+((4+5)+(6+7)). A rank has 4, 2 or 1 of them, which are a branch of this tree. Layers
// that are not cut have one. Segment 0 begins at tile `begin` of the packed weights, and segment i ends before tile
// end[i]. Tile t of the weights is multiplied by tile t - begin of the input: the packed weights of a rank begin with a
// whole block, in which its segments may begin later.
struct Segments {
    int32_t count;
    int32_t begin;
    int32_t end[kSegments];
};

enum class EpilogueKind : int32_t {
    kStore,   // out[m][n] = y
    kAdd,     // out[m][n] = out[m][n] + y
    kGated,   // act(y of the gate) * (y of up), written as A8, bfloat16 or float32
    kLogits,  // out[m][n] = scale * y, soft-capped; block_max[m][n / 64] = the largest of 64, NaN if one is NaN
};

// y is the sum plus the bias. A8 and bfloat16 results are written as whole rows, padded with zeros.
struct Epilogue {
    EpilogueKind kind;
    Activation act;    // kGated
    float* out;        // kGated: may be null when a8 or bf16 is given
    int64_t stride;    // floats between two rows of out
    A8 a8;             // kGated: the output, or blocks null
    Bf16Rows bf16;     // kGated: the output, or x null
    float scale;       // kLogits
    float softcap;     // kLogits: softcap * tanh(y / softcap); 0: none
    float* block_max;  // kLogits: [rows][max_stride], or null
    int64_t max_stride;
};

// Memory to prefetch that is used after the current weights (K and V of the next attention). Kernels prefetch a piece
// of it in each pass that has no weights to prefetch. One thread's part is pages[at] and every `step`-th page after it.
struct FetchList {
    const uint8_t* base;  // page p is at base + p * page_bytes; null: nothing to fetch
    const int32_t* pages;
    int64_t page_bytes;
    int32_t count, step;
    int32_t at;
    int64_t offset;  // within pages[at]
};

struct LinearTask {
    const PackedTensor* weight;  // kGated: the gate
    const PackedTensor* up;      // kGated: has the size of the gate
    const Segments* segments;
    A8 a8;          // input of integer kinds
    Bf16Rows bf16;  // input of kBf16
    Epilogue epilogue;
    int32_t unit_blocks;  // row blocks per unit, see LinearKernels
    bool panels;          // unpack the weights of a unit once for many rows; same results
    void* scratch;        // kLinearScratchBytes, 64-byte aligned, of the calling thread; used with `panels`
    FetchList* fetch;     // of the calling thread, or null
};

// Whether a tensor and its input have one scale a row, so that only the sum of a segment is scaled.
static constexpr bool by_row(PackedKind kind, const A8& x) { return layout_of(kind).by_row() && one_scale(x.rounding); }

constexpr size_t kLinearScratchBytes = 256 << 10;

// Most input rows of one call with panels: they stay in the cache for a pass over the weights.
constexpr int kStretchRows = 256;

// The outputs n are cut into units of `unit_blocks` row blocks: 1 or 2 for kStore and kAdd (panels: 2), 2 of gate and 2
// of up for kGated, 4 for kLogits.
struct LinearKernels {
    // Computes units [first, last) for input rows [row0, row1); with panels at most kStretchRows rows.
    void (*run)(const LinearTask& task, int first, int last, int row0, int row1);
    int direct_rows;  // up to this number of rows the direct kernels are faster than panels
};

}  // namespace headrace
