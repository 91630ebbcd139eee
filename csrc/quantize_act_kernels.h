// Activation rows on their way into a linear layer: normalised, then int8 with a scale per 32 columns ("A8"), or bfloat16.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace headrace {

// Columns are padded with zeros to a multiple of 64. The sums let a linear take a weight's zero point or minimum out.
// Row r of an array begins at r times its width: q kp, scale, scaled_sum and neg_sum32 kp / 32, neg_sum16 kp / 16.
struct A8 {
    int8_t* q;           // round(x / scale) to nearest even, in [-127, 127]
    float* scale;        // largest |x| of the group / 127; NaN when a value of the group is not finite
    float* scaled_sum;   // scale * (sum of the group's q)
    int32_t* neg_sum32;  // -(sum of q) per 32
    int32_t* neg_sum16;  // -(sum of q) per 16
    int32_t kp;
};

struct Bf16Rows {
    uint16_t* x;  // [rows][kp], zero past k
    int32_t kp;
};

enum class NormKind : int32_t { kNone, kRms, kLayer };

// kRms: x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019); kLayer: (x - mean) / sqrt(var + eps) * weight + bias.
struct Norm {
    NormKind kind;
    const float* weight;  // [k]; may be null for kNone
    const float* bias;    // [k] or null
    float eps;
};

enum class Activation : int32_t { kSilu, kGeluTanh };

// Rows [first, last) of x, row r at x + r * stride. `scratch`: k floats of the calling thread, used when norm.kind is set.
struct QuantizeKernels {
    void (*to_a8)(const float* x, int64_t stride, int first, int last, int k, const Norm& norm, float* scratch,
                  const A8& out);
    void (*to_bf16)(const float* x, int64_t stride, int first, int last, int k, const Norm& norm, float* scratch,
                    const Bf16Rows& out);
    void (*norm)(const float* x, int64_t stride, int first, int last, int k, const Norm& norm, float* out,
                 int64_t out_stride);
    void (*act)(Activation kind, const float* x, int64_t n, float* out);                              // out = act(x)
    void (*act_mul)(Activation kind, const float* gate, const float* up, int64_t n, float* out);      // act(gate) * up
};

static inline int32_t padded_k(int32_t k) { return (k + 63) / 64 * 64; }

// Bytes of the A8 arrays of `rows` rows, and the arrays laid out in such a buffer (64-byte aligned).
static inline size_t a8_bytes(int32_t rows, int32_t k) { return (size_t)rows * padded_k(k) / 32 * (32 + 3 * 4 + 2 * 4); }

static inline A8 a8_view(void* buffer, int32_t rows, int32_t k) {
    A8 a;
    a.kp = padded_k(k);
    const size_t groups = (size_t)rows * a.kp / 32;
    a.q = (int8_t*)buffer;
    a.scale = (float*)(a.q + groups * 32);
    a.scaled_sum = a.scale + groups;
    a.neg_sum32 = (int32_t*)(a.scaled_sum + groups);
    a.neg_sum16 = a.neg_sum32 + groups;
    return a;
}

}  // namespace headrace
