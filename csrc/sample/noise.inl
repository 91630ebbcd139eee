// Sampling noise: Philox4x32-10 (Salmon et al., SC'11) and Gumbel values, with the bits of headrace.ops.noise. Every
// product and sum is rounded (-ffp-contract=off): fused operations would change the tokens of a seed.
#pragma once

#include "sample/kernels.h"
#include "vec/scan.h"

namespace headrace::HEADRACE_ISA {

// Ten rounds on kHalf counters in 64-bit lanes. Only the low words are used.
HEADRACE_INLINE void philox(U64v (&c)[4], const Noise& noise) {
    const U64v m0 = set_u64(0xD2511F53), m1 = set_u64(0xCD9E8D57);
    uint32_t k0 = noise.key[0], k1 = noise.key[1];
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
        const U64v a = mul_low(c[0], m0), b = mul_low(c[2], m1);
        c[0] = (b >> 32) ^ c[1] ^ set_u64(k0);
        c[1] = b;
        c[2] = (a >> 32) ^ c[3] ^ set_u64(k1);
        c[3] = a;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
}

HEADRACE_INLINE void set_counter(U64v (&c)[4], U64v groups, const Noise& noise) {
    c[0] = set_u64(noise.position);
    c[1] = groups;
    c[2] = set_u64(noise.purpose);
    c[3] = set_u64(0);
}

// Index of the counter in lane p of kLanes, so that transposing the words within 128 bits puts the tokens in order.
constexpr uint64_t counter_of(int p) { return static_cast<uint64_t>(kLanes / 4 * (p % 4) + p / 4); }

// Random words of 4 * kLanes tokens from id `first` (a multiple of 4 * kLanes) on, in order of their ids.
HEADRACE_INLINE void noise_words(U32v (&w)[4], int first, const Noise& noise) {
    U64v even = {}, odd = {};
    for (int i = 0; i < kHalf; ++i) even[i] = counter_of(2 * i), odd[i] = counter_of(2 * i + 1);
    U64v a[4], b[4];
    set_counter(a, even + static_cast<uint64_t>(first / 4), noise);
    set_counter(b, odd + static_cast<uint64_t>(first / 4), noise);
    philox(a, noise);
    philox(b, noise);
    U32v x[4];
    for (int i = 0; i < 4; ++i) x[i] = even_low(a[i], b[i]);
    const U32v lo01 = interleave<false, 1>(x[0], x[1]), hi01 = interleave<true, 1>(x[0], x[1]);
    const U32v lo23 = interleave<false, 1>(x[2], x[3]), hi23 = interleave<true, 1>(x[2], x[3]);
    w[0] = interleave<false, 2>(lo01, lo23);
    w[1] = interleave<true, 2>(lo01, lo23);
    w[2] = interleave<false, 2>(hi01, hi23);
    w[3] = interleave<true, 2>(hi01, hi23);
}

// Splits x = 2^e (1 + f) with 1 + f between sqrt(1/2) and sqrt(2).
HEADRACE_INLINE void split(F32v x, F32v& f, I32v& e) {
    const I32v bits = as_i32(x);
    e = (bits - 0x3f3504f3) >> 23;
    f = as_f32(bits - (e << 23)) - set_f32(1.0f);
}

HEADRACE_INLINE F32v ln(F32v f, I32v e) {
    constexpr float kQ[9] = {-0x1.fffff8p-2f, 0x1.555558p-2f,  -0x1.00041cp-2f, 0x1.999fbcp-3f, -0x1.5425aep-3f,
                             0x1.22c058p-3f,  -0x1.0f9622p-3f, 0x1.068486p-3f,  -0x1.321fcep-4f};
    F32v q = set_f32(kQ[8]);
#pragma GCC unroll 8
    for (int i = 7; i >= 0; --i) q = q * f + set_f32(kQ[i]);
    const F32v exponent = to_f32(e);
    return (((f * f) * q + exponent * set_f32(-0x1.bd0106p-13f)) + f) + exponent * set_f32(0.693359375f);
}

// Gumbel(0, 1) noise of kLanes words. It decreases as the word grows, and is below -ln(word / 2^32).
HEADRACE_INLINE F32v gumbel(U32v word) {
    const U32v high = (U32v)((word >> 30) != 0);  // all ones if the word is at least 2^30
    const F32v y = unsigned_f32(word ^ high) * set_f32(0x1p-32f) + set_f32(0x1p-33f);
    F32v f;
    I32v e;
    split(y, f, e);
    const I32v upper = (I32v)high;
    f = as_f32((as_i32(f) & upper) | (as_i32(-y) & ~upper));
    split(-ln(f, e & upper), f, e);
    return -ln(f, e);
}

static void gumbel_words(const uint32_t* words, int n, float* out) {
    for (int i = 0; i < n; i += kLanes) {
        U32v w = {};
        const int count = n - i < kLanes ? n - i : kLanes;
        __builtin_memcpy(&w, words + i, 4 * static_cast<size_t>(count));
        store_f32(out + i, gumbel(w), count);
    }
}

static void gumbel_row(int n, const Noise& noise, float* out) {
    for (int first = 0; first < n; first += 4 * kLanes) {
        U32v w[4];
        noise_words(w, first, noise);
        for (int j = 0; j < 4; ++j) {
            const int at = first + j * kLanes, count = n - at;
            if (count > 0) store_f32(out + at, gumbel(w[j]), count < kLanes ? count : kLanes);
        }
    }
}

static void gumbel_of_ids(const int32_t* ids, int n, const Noise& noise, float* out) {
    for (int i = 0; i < n; i += kLanes) {
        const int count = n - i < kLanes ? n - i : kLanes;
        U64v even = {}, odd = {}, a[4], b[4];
        uint64_t group[2][kHalf] = {};
        for (int j = 0; j < count; ++j) group[j % 2][j / 2] = static_cast<uint32_t>(ids[i + j]) >> 2;
        __builtin_memcpy(&even, group[0], sizeof even);
        __builtin_memcpy(&odd, group[1], sizeof odd);
        set_counter(a, even, noise);
        set_counter(b, odd, noise);
        philox(a, noise);
        philox(b, noise);
        U32v x[4], w = {};
        for (int k = 0; k < 4; ++k) x[k] = even_low(a[k], b[k]);
        for (int j = 0; j < count; ++j) w[j] = x[ids[i + j] & 3][j];
        store_f32(out + i, gumbel(w), count);
    }
}

}  // namespace headrace::HEADRACE_ISA
