// Kernels that convert activation rows to inputs of linear layers: a norm, then int8 with a scale per 32 columns (A8),
// or bfloat16.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace headrace {

// 64 columns of a row: two groups of 32. Kernels use the sums to subtract a weight's zero point or add its minimum. One
// block holds everything that a kernel reads, so a row is one contiguous stream.
struct A8Block {
    int8_t q[64];          // round(x / scale) to nearest even, in [-127, 127]
    float scale[2];        // largest |x| of the group / 127; NaN if a value of the group (kToken,
                           // kTensor: of the row) is not finite
    float scaled_sum[2];   // scale * (sum of the group's q)
    int32_t neg_sum32[2];  // -(sum of q) per 32
    int32_t neg_sum16[4];  // -(sum of q) per 16
};

// Source of the scale of 32 columns. kGroup: the 32 columns. kToken: the whole row. kSplit: the 32 columns without the
// row's outliers. kTensor: given, one for all rows; larger values are clamped.
enum class Rounding : int32_t { kGroup, kToken, kSplit, kTensor };

// Whether all scales of a row are equal.
static constexpr bool one_scale(Rounding rounding) {
    return rounding == Rounding::kToken || rounding == Rounding::kTensor;
}

constexpr int kMostOutliers = 64;  // per row

// Columns of a row that are not rounded (LLM.int8(), Dettmers et al. 2022), ascending. They are 0 among the integers
// and are multiplied in float32. Outliers are the values with |x| >= threshold. If there are more than kMostOutliers,
// the largest are kept, and among equal values the first.
struct Outliers {
    int32_t count;
    int32_t column[kMostOutliers];
    float value[kMostOutliers];
};

// Row r is blocks[r * tiles .. (r + 1) * tiles): k columns padded with zeros to a multiple of 64.
struct A8 {
    A8Block* blocks;
    int32_t tiles;
    Rounding rounding = Rounding::kGroup;
    float threshold = 0.0f;          // kSplit: threshold of outliers; kTensor: the scale
    Outliers* outliers = nullptr;    // kSplit: [rows]; otherwise null
    const float* largest = nullptr;  // kToken: [rows] largest |x| of the whole row, if x is a part of it; or null
};

struct Bf16Rows {
    uint16_t* x;  // [rows][kp], zero past k
    int32_t kp;
};

enum class NormKind : int32_t { kNone, kRms, kLayer };

// kRms: x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019); kLayer: (x - mean) / sqrt(var + eps) * weight +
// bias.
struct Norm {
    NormKind kind;
    const float* weight;  // [k]; may be null for kNone
    const float* bias;    // [k] or null
    float eps;
};

enum class Activation : int32_t { kSilu, kGeluTanh, kGelu };

// Rows [first, last) of x [rows][k]; row r is at x + r * stride. `scratch`: k floats of the calling thread, used if
// there is a norm.
struct QuantizeKernels {
    void (*to_a8)(const float* x, int64_t stride, int first, int last, int k, const Norm& norm, float* scratch,
                  const A8& out);
    void (*to_bf16)(const float* x, int64_t stride, int first, int last, int k, const Norm& norm, float* scratch,
                    const Bf16Rows& out);
    void (*norm)(const float* x, int64_t stride, int first, int last, int k, const Norm& norm, float* out,
                 int64_t out_stride);
    // out = act(x)
    void (*act)(Activation kind, const float* x, int64_t n, float* out);
    // out = act(gate) * up
    void (*act_mul)(Activation kind, const float* gate, const float* up, int64_t n, float* out);
};

static inline int32_t tiles_of(int32_t k) { return (k + 63) / 64; }

static inline size_t a8_bytes(int32_t rows, int32_t k) { return (size_t)rows * tiles_of(k) * sizeof(A8Block); }

// The same, including the outliers after the blocks for kSplit.
static inline size_t a8_bytes(int32_t rows, int32_t k, Rounding rounding) {
    return a8_bytes(rows, k) + (rounding == Rounding::kSplit ? (size_t)rows * sizeof(Outliers) : 0);
}

// An A8 of `rows` rows of k columns in memory of a8_bytes.
static inline A8 a8_at(void* memory, int32_t rows, int32_t k, Rounding rounding, float threshold) {
    A8Block* blocks = (A8Block*)memory;
    const bool split = rounding == Rounding::kSplit;
    return {blocks, tiles_of(k), rounding, threshold,
            split ? (Outliers*)(blocks + (size_t)rows * tiles_of(k)) : nullptr};
}

}  // namespace headrace
