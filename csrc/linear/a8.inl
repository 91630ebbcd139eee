// Conversion of float32 to A8. Epilogues and attention kernels also use it to write quantized results.
#pragma once

#include "linear/quantize_act_kernels.h"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

struct GroupScale {
    float scale, inverse;
    bool finite;
};

// Maximum of `sizes` and the absolute values of 32 floats, per lane, as bits. As integers these bits sort finite
// values, then infinity, then NaN.
HEADRACE_INLINE I32v sizes_of(const float* x, I32v sizes) {
    for (int i = 0; i < 32; i += kLanes) sizes = max(sizes, as_i32(load_f32(x + i)) & 0x7fffffff);
    return sizes;
}

HEADRACE_INLINE GroupScale scale_of_sizes(I32v sizes) {
    const int32_t largest = max_i32(sizes);
    float amax;
    __builtin_memcpy(&amax, &largest, 4);
    const bool finite = largest < 0x7f800000, tiny = !(amax > 1e-35f);  // 127 / tiny would overflow
    return {!finite ? __builtin_nanf("") : tiny ? 0.0f : amax / 127.0f, tiny ? 0.0f : 127.0f / amax, finite};
}

HEADRACE_INLINE GroupScale group_scale(const float* x) { return scale_of_sizes(sizes_of(x, set_i32(0))); }

// Quantizes 32 floats x to columns [32 * half, 32 * half + 32) of the block.
HEADRACE_INLINE void put_group(const float* x, const GroupScale& by, A8Block* block, int half) {
    constexpr int kVectors = 32 / kLanes;
    const F32v inverse = set_f32(by.inverse);
    I32v q[kVectors];
    for (int i = 0; i < kVectors; ++i) q[i] = by.finite ? round_i32(load_f32(x + i * kLanes) * inverse) : set_i32(0);
    int32_t sums[2] = {0, 0};
#if HEADRACE_LANES == 16
    store_i8_sums(block->q + half * 32, q, sums);
#else
    for (int i = 0; i < kVectors; ++i) {
        store_i8(block->q + half * 32 + i * kLanes, q[i]);
        sums[i * kLanes / 16] += sum_i32(q[i]);
    }
#endif
    block->scale[half] = by.scale;
    block->scaled_sum[half] = by.scale * (float)(sums[0] + sums[1]);
    block->neg_sum32[half] = -(sums[0] + sums[1]);
    block->neg_sum16[2 * half] = -sums[0];
    block->neg_sum16[2 * half + 1] = -sums[1];
}

HEADRACE_INLINE void quantize_group(const float* x, A8Block* block, int half) {
    put_group(x, group_scale(x), block, half);
}

// kGroup: quantizes k floats to `tiles` blocks, padded with zeros.
HEADRACE_INLINE void quantize_row(const float* x, int k, A8Block* blocks, int tiles) {
    int g = 0;
    for (; (g + 1) * 32 <= k; ++g) quantize_group(x + g * 32, blocks + g / 2, g % 2);
    for (; g < tiles * 2; ++g) {
        float padded[32] = {};
        for (int i = 0; g * 32 + i < k; ++i) padded[i] = x[g * 32 + i];
        quantize_group(padded, blocks + g / 2, g % 2);
    }
}

// Columns [32 * g, 32 * g + 32) of a row of k; copied to `padded` with zeros if the row ends among them.
HEADRACE_INLINE const float* group_of(const float* x, int k, int g, float* padded) {
    if ((g + 1) * 32 <= k) return x + g * 32;
    for (int i = 0; i < 32; ++i) padded[i] = g * 32 + i < k ? x[g * 32 + i] : 0.0f;
    return padded;
}

// kToken: the same with one scale for the row, from its largest |x| if that is given.
HEADRACE_INLINE void quantize_token(const float* x, int k, const float* largest, A8Block* blocks, int tiles) {
    float padded[32];
    int32_t size = 0;
    if (largest) __builtin_memcpy(&size, largest, 4);
    I32v sizes = set_i32(size);
    for (int g = 0; g * 32 < k && !largest; ++g) sizes = sizes_of(group_of(x, k, g, padded), sizes);
    const GroupScale scale = scale_of_sizes(sizes);
    for (int g = 0; g < tiles * 2; ++g) put_group(group_of(x, k, g, padded), scale, blocks + g / 2, g % 2);
}

// kTensor: the same with a given scale; x / scale is clamped to [-127, 127]. Every scale of a row with a value that is
// not finite is NaN: kernels with one scale a row read the first one.
HEADRACE_INLINE void quantize_given(const float* x, int k, float scale, A8Block* blocks, int tiles) {
    float padded[32], cut[32];
    const F32v unit = set_f32(scale), most = set_f32(127.0f);
    bool finite = true;
    for (int g = 0; g < tiles * 2; ++g) {
        const float* from = group_of(x, k, g, padded);
        const bool group = max_i32(sizes_of(from, set_i32(0))) < 0x7f800000;
        for (int i = 0; i < 32; i += kLanes) store_f32(cut + i, min(max(load_f32(from + i) / unit, -most), most));
        put_group(cut, {scale, 1.0f, group}, blocks + g / 2, g % 2);
        finite &= group;
    }
    for (int tile = 0; tile < tiles && !finite; ++tile) {
        for (int half = 0; half < 2; ++half) {
            blocks[tile].scale[half] = blocks[tile].scaled_sum[half] = __builtin_nanf("");
        }
    }
}

HEADRACE_INLINE int32_t size_bits(const float* x) {
    int32_t bits;
    __builtin_memcpy(&bits, x, 4);
    return bits & 0x7fffffff;
}

// Number of finite values whose absolute value has at least the bits `least`.
HEADRACE_INLINE int count_from(const float* x, int k, int32_t least) {
    int count = 0;
    for (int i = 0; i < k; ++i) count += size_bits(x + i) >= least && size_bits(x + i) < 0x7f800000;
    return count;
}

HEADRACE_INLINE void find_outliers(const float* x, int k, float threshold, Outliers& out) {
    int32_t least = size_bits(&threshold);
    if (count_from(x, k, least) > kMostOutliers) {  // bisect the largest size that kMostOutliers values reach
        int32_t most = 0x7f800000;
        while (most - least > 1) {
            const int32_t middle = least + (most - least) / 2;
            (count_from(x, k, middle) >= kMostOutliers ? least : most) = middle;
        }
    }
    int equal = kMostOutliers - count_from(x, k, least + 1);  // number of values of the smallest size to keep
    out.count = 0;
    for (int i = 0; i < k; ++i) {
        const int32_t size = size_bits(x + i);
        if (size < least || size >= 0x7f800000 || (size == least && equal-- <= 0)) continue;
        out.column[out.count] = i;
        out.value[out.count++] = x[i];
    }
}

// kSplit: sets the row's outliers to 0 and quantizes the rest with a scale per 32 columns.
HEADRACE_INLINE void quantize_split(const float* x, int k, float threshold, Outliers& out, A8Block* blocks, int tiles) {
    find_outliers(x, k, threshold, out);
    float left[32];
    for (int g = 0, next = 0; g < tiles * 2; ++g) {
        for (int i = 0; i < 32; ++i) left[i] = g * 32 + i < k ? x[g * 32 + i] : 0.0f;
        for (; next < out.count && out.column[next] < (g + 1) * 32; ++next) left[out.column[next] - g * 32] = 0.0f;
        quantize_group(left, blocks + g / 2, g % 2);
    }
}

}  // namespace headrace::HEADRACE_ISA
