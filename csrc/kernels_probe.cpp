// What one instruction set can do at most.
#include "probe_kernels.h"
#include "vec/softmax.h"

namespace headrace::HEADRACE_ISA {

static uint8_t read(const uint8_t* data, int64_t bytes) {
    U8v x = {}, y = {};
    for (int64_t i = 0; i < bytes; i += 1024) {
        for (int line = 0; line < 1024; line += 64) prefetch(data + i + 8192 + line);
        for (int at = 0; at < 1024; at += 8 * kLanes) {
            x = x ^ load_u8(data + i + at);
            y = y ^ load_u8(data + i + at + 4 * kLanes);
        }
    }
    x = x ^ y;
    uint8_t all = 0;
    for (int i = 0; i < 4 * kLanes; ++i) all ^= x[i];
    return all;
}

// As many sums side by side as hide how long one takes; plain vectors are narrow, and the compiler keeps few of them.
constexpr int kSums = kLanes == 4 ? 4 : 10;

template <class Sum, class Multiply>
HEADRACE_INLINE void repeat(int64_t rounds, Sum start, Multiply multiply, Sum* sums) {
    for (int i = 0; i < kSums; ++i) sums[i] = start;
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 10
        for (int i = 0; i < kSums; ++i) sums[i] = multiply(sums[i]);
    }
}

HEADRACE_INLINE void give(const F32v* sums, float* sink) {
    F32v sum = sums[0];
    for (int i = 1; i < kSums; ++i) sum = sum + sums[i];
    store_f32(sink, sum);
}

static int64_t int8(int64_t rounds, float* sink) {
    alignas(64) uint8_t bytes[64];
    for (int i = 0; i < 64; ++i) bytes[i] = (uint8_t)(i % 16);
    const int8_t quad[4] = {1, -2, 3, -4};
    const U8v w = load_u8(bytes);
    I32v sums[kSums];
    repeat(rounds, set_i32(0), [&](I32v sum) __attribute__((always_inline)) { return dot<false>(sum, w, quad); }, sums);
    F32v floats[kSums];
    for (int i = 0; i < kSums; ++i) floats[i] = to_f32(sums[i]);
    give(floats, sink);
    return rounds * kSums * kLanes * 4;
}

static int64_t bf16(int64_t rounds, float* sink) {
    const uint16_t pair[2] = {0x3f80, 0xbf80};
    const U8v w = (U8v)set_i32(0x3f803f80);
    F32v sums[kSums];
    repeat(
        rounds, set_f32(0.0f), [&](F32v sum) __attribute__((always_inline)) { return add_pairs(sum, w, pair); }, sums);
    give(sums, sink);
    return rounds * kSums * kLanes * 2;
}

static int64_t f32(int64_t rounds, float* sink) {
    const F32v w = set_f32(0.5f), x = set_f32(0.25f);
    F32v sums[kSums];
    repeat(
        rounds, set_f32(0.0f), [&](F32v sum) __attribute__((always_inline)) { return multiply_add(w, x, sum); }, sums);
    give(sums, sink);
    return rounds * kSums * kLanes;
}

extern const ProbeKernels probe_kernels;
const ProbeKernels probe_kernels = {read, int8, bf16, f32};

}  // namespace headrace::HEADRACE_ISA
