// Linear layers: y[m][n] = sum over k of x[m][k] * w[n][k], x as A8 (integer weights) or bfloat16 (kBf16 weights).
//
// Row-invariant: element (m, n) goes through one sequence of float operations, whatever the other rows are, however the
// work is cut, and on every instruction set (bfloat16: subnormals aside). Per group of columns, in order of k:
//   acc = fma(float(integer dot) * x.scale, w.scale, acc);  with a minimum also  acc = fma(w.min, x.scaled_sum, acc)
// The integer dot is exact: the zero point is taken out in integers. Groups of 16 use the scale of their 32.
// kBf16: two chains, even and odd pairs of columns, added at the end.
#pragma once

#include "linear/quantize_act_kernels.h"
#include "linear/tile.h"

namespace headrace {

constexpr int kSegments = 8;

// The sums over k of layers that tensor parallelism cuts along k: eight segments of tiles, segment i ending before tile
// end[i], each summed from zero, joined as ((0+1)+(2+3))+((4+5)+(6+7)). count 1: one sum over everything.
struct Segments {
    int32_t count;
    int32_t end[kSegments];
};

enum class EpilogueKind : int32_t {
    kStore,   // out[m][n] = y
    kAdd,     // out[m][n] = out[m][n] + y
    kGated,   // act(y of `gate`) * (y of `up`), left as A8, bfloat16 or float32
    kLogits,  // out[m][n] = scale * y, soft-capped; block_max[m][n / 64] = the largest of 64, NaN if one is
};

// y is the sum plus the bias. A8 and bfloat16 results are the next layer's input: whole padded rows are written.
struct Epilogue {
    EpilogueKind kind;
    Activation act;    // kGated
    float* out;        // kGated: may be null when a8 or bf16 is given
    int64_t stride;    // floats between two rows of out
    A8 a8;             // kGated: blocks null, or where the result goes
    Bf16Rows bf16;     // kGated: x null, or where the result goes
    float scale;       // kLogits
    float softcap;     // kLogits: softcap * tanh(y / softcap); 0: none
    float* block_max;  // kLogits: [rows][max_stride], or null
    int64_t max_stride;
};

// Memory that is wanted after the weights at hand (K and V of the next attention): kernels fetch it a piece at a time
// where a pass over the weights has nothing else to fetch. One thread's part: pages[at], every `step`-th.
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
    const PackedTensor* up;      // kGated: of the same size
    const Segments* segments;
    A8 a8;          // input of integer kinds
    Bf16Rows bf16;  // input of kBf16
    Epilogue epilogue;
    int32_t unit_blocks;  // see below
    bool panels;          // unpack the weights of a unit once, then multiply many rows: the same results
    void* scratch;        // kLinearScratchBytes, 64-byte aligned, of the calling thread; used with `panels`
    FetchList* fetch;     // of the calling thread, or null
};

constexpr size_t kLinearScratchBytes = 256 << 10;

// Most input rows at a time: few enough that they stay in the caches while the weights go by.
constexpr int kStretchRows = 256;

// Work along n is cut into units of `unit_blocks` row blocks: 1 or 2 for kStore and kAdd (panels: 2), 2 (of gate and of
// up each) for kGated, 4 for kLogits.
struct LinearKernels {
    // Units [first, last) for input rows [row0, row1), with panels at most kStretchRows.
    void (*run)(const LinearTask& task, int first, int last, int row0, int row1);
    int direct_rows;  // up to so many rows the direct kernels are the faster ones
};

}  // namespace headrace
