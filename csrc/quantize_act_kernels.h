// Activation rows on their way into a linear layer: normalised, then int8 with a scale per 32 columns ("A8"), or
// bfloat16.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace headrace {

// 64 columns of a row: two groups of 32. The sums let a linear take a weight's zero point or minimum out.
// One block holds all that a kernel reads, so that a row is one stream at one address.
struct A8Block {
    int8_t q[64];          // round(x / scale) to nearest even, in [-127, 127]
    float scale[2];        // largest |x| of the group / 127; NaN when a value of the group is not finite
    float scaled_sum[2];   // scale * (sum of the group's q)
    int32_t neg_sum32[2];  // -(sum of q) per 32
    int32_t neg_sum16[4];  // -(sum of q) per 16
};

// Row r is blocks[r * tiles .. (r + 1) * tiles): k columns padded with zeros to a multiple of 64.
struct A8 {
    A8Block* blocks;
    int32_t tiles;
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

// Rows [first, last) of x, row r at x + r * stride. `scratch`: k floats of the calling thread, used when norm.kind is
// set.
struct QuantizeKernels {
    void (*to_a8)(const float* x, int64_t stride, int first, int last, int k, const Norm& norm, float* scratch,
                  const A8& out);
    void (*to_bf16)(const float* x, int64_t stride, int first, int last, int k, const Norm& norm, float* scratch,
                    const Bf16Rows& out);
    void (*norm)(const float* x, int64_t stride, int first, int last, int k, const Norm& norm, float* out,
                 int64_t out_stride);
    void (*act)(Activation kind, const float* x, int64_t n, float* out);                          // out = act(x)
    void (*act_mul)(Activation kind, const float* gate, const float* up, int64_t n, float* out);  // act(gate) * up
};

static inline int32_t tiles_of(int32_t k) { return (k + 63) / 64; }

static inline size_t a8_bytes(int32_t rows, int32_t k) { return (size_t)rows * tiles_of(k) * sizeof(A8Block); }

}  // namespace headrace
