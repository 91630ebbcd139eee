// float32 to A8. Also what an epilogue or an attention kernel calls to leave its result quantised.
#pragma once

// How a group of 32 becomes integers: by its largest value.
struct GroupScale {
    float scale, inverse;
    bool finite;
};

HEADRACE_INLINE GroupScale group_scale(const float* x) {
    I32v sizes = set_i32(0);  // as integers, sizes of floats are in order: finite ones, infinity, NaN
    for (int i = 0; i < 32; i += kLanes) sizes = max(sizes, as_i32(load_f32(x + i)) & 0x7fffffff);
    const int32_t largest = max_i32(sizes);
    float amax;
    __builtin_memcpy(&amax, &largest, 4);
    const bool finite = largest < 0x7f800000, tiny = !(amax > 1e-35f);  // 127 / tiny would overflow
    return {!finite ? __builtin_nanf("") : tiny ? 0.0f : amax / 127.0f, tiny ? 0.0f : 127.0f / amax, finite};
}

// x: 32 floats, columns [32 * half, 32 * half + 32) of the block.
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

// k floats into `tiles` blocks; the rest is zero.
HEADRACE_INLINE void quantize_row(const float* x, int k, A8Block* blocks, int tiles) {
    int g = 0;
    for (; (g + 1) * 32 <= k; ++g) quantize_group(x + g * 32, blocks + g / 2, g % 2);
    for (; g < tiles * 2; ++g) {
        float padded[32] = {};
        for (int i = 0; g * 32 + i < k; ++i) padded[i] = x[g * 32 + i];
        quantize_group(padded, blocks + g / 2, g % 2);
    }
}
