// Probe kernels of one instruction set.
#include "kernels/probe.h"

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

constexpr int kSums = kTuning.probe_sums;

// Makes the compiler assume that the memory at `p` changed, so that it computes the products again.
HEADRACE_INLINE void look_again(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

// All loops over sums are unrolled to keep the sums in registers.
HEADRACE_INLINE int64_t give(int64_t count, const F32v* sums, float* sink) {
    F32v sum = sums[0];
#pragma GCC unroll 12
    for (int i = 1; i < kSums; ++i) sum = sum + sums[i];
    store_f32(sink, sum);
    return count;
}

static int64_t int8(int64_t rounds, float* sink) {
    constexpr int kProducts = 8;  // per DotSum, as in a group of 32 columns
    alignas(64) uint8_t bytes[64];
    for (int i = 0; i < 64; ++i) bytes[i] = (uint8_t)(i % 16);
    int8_t quads[4 * kSums];  // different for each sum, so that the compiler cannot share products
    for (int i = 0; i < 4 * kSums; ++i) quads[i] = (int8_t)(i % 2 ? -i : i);
    const U8v w = load_u8(bytes);
    I32v dots[kSums];
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) dots[i] = set_i32(0);
    for (int64_t round = 0; round < rounds; ++round) {
        DotSum sums[kSums];
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) sums[i] = dot_begin(dots[i]);
#pragma GCC unroll 8
        for (int j = 0; j < kProducts; ++j) {
            look_again(quads);
#pragma GCC unroll 12
            for (int i = 0; i < kSums; ++i) sums[i] = dot_add<false>(sums[i], w, quads + 4 * i);
        }
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) dots[i] = dot_end(dots[i], sums[i]);
    }
    F32v floats[kSums];
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) floats[i] = to_f32(dots[i]);
    return give(rounds * kSums * kProducts * kLanes * 4, floats, sink);
}

static int64_t bf16(int64_t rounds, float* sink) {
    uint16_t pairs[2 * kSums];
    for (int i = 0; i < 2 * kSums; ++i) pairs[i] = (uint16_t)(i % 2 ? 0xbf80 : 0x3f80);
    const U8v w = (U8v)set_i32(0x3f803f80);
    F32v sums[kSums];
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = set_f32(0.0f);
    for (int64_t round = 0; round < rounds; ++round) {
        look_again(pairs);
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) sums[i] = add_pairs(sums[i], w, pairs + 2 * i);
    }
    return give(rounds * kSums * kLanes * 2, sums, sink);
}

static int64_t f32(int64_t rounds, float* sink) {
    float x[kSums];
    for (int i = 0; i < kSums; ++i) x[i] = (float)i;
    const F32v w = set_f32(0.5f);
    F32v sums[kSums];
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = set_f32(0.0f);
    for (int64_t round = 0; round < rounds; ++round) {
        look_again(x);
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) sums[i] = multiply_add(w, set_f32(x[i]), sums[i]);
    }
    return give(rounds * kSums * kLanes, sums, sink);
}

extern const ProbeKernels probe_kernels;
const ProbeKernels probe_kernels = {read, int8, bf16, f32};

}  // namespace headrace::HEADRACE_ISA
