// The vectors of one instruction set (csrc/vec) as functions on arrays, for vec_test.cpp. vec_shim.cpp is compiled once
// per instruction set and follows the rules of kernels (vec/vec.h).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace headrace {

// Arrays have n values, n a multiple of 16, unless a comment gives another size. A result has the index of its input.
struct VecShim {
    int lanes;
    int wide_zero;  // kWideZero
    int (*dot_room)(int most);

    // vec.h: floats
    void (*copy)(const float* x, int n, float* out);           // load_f32, store_f32
    void (*load_part)(const float* p, int count, float* out);  // load_f32(p, count), all lanes of it
    void (*store_part)(const float* x, int count, float* p);   // store_f32(p, lanes of x, count)
    void (*set_f32)(float x, float* out);                      // one vector
    void (*fma)(const float* x, const float* y, const float* z, int n, float* out);
    void (*max)(const float* x, const float* y, int n, float* out);
    void (*min)(const float* x, const float* y, int n, float* out);
    void (*as_i32)(const float* x, int n, int32_t* out);
    void (*as_f32)(const int32_t* x, int n, float* out);
    void (*to_f32)(const int32_t* x, int n, float* out);
    void (*round_i32)(const float* x, int n, int32_t* out);
    void (*load_f16)(const uint16_t* x, int n, float* out);
    void (*load_bf16)(const uint16_t* x, int n, float* out);
    void (*store_bf16)(const float* x, int n, uint16_t* out);
    void (*load_i8_f32)(const int8_t* x, int n, float* out);
    void (*load_u8_f32)(const uint8_t* x, int n, float* out);

    // vec.h: integers
    void (*load_u8_i32)(const uint8_t* x, int n, int32_t* out);
    void (*set_i32)(int32_t x, int32_t* out);  // one vector
    void (*shift_left)(const int32_t* x, int count, int n, int32_t* out);
    void (*max_ints)(const int32_t* x, const int32_t* y, int n, int32_t* out);
    int32_t (*max_i32)(const int32_t* x);  // of one vector
    int32_t (*sum_i32)(const int32_t* x);
    void (*store_i8)(const int32_t* x, int n, int8_t* out);
    void (*store_i8_sums)(const int32_t* x, int8_t* out,
                          int32_t* sums);  // 32 values, 2 sums; AVX-512 only, otherwise null

    // vec.h: bytes, 64 of them
    void (*copy_bytes)(const uint8_t* x, uint8_t* out);
    void (*field)(int bits, int from, int to, const uint8_t* x, uint8_t* out);
    void (*lookup)(const uint8_t* table, const uint8_t* index, uint8_t* out);
    void (*pick)(const int32_t* eight, const int32_t* index, int32_t* out);  // 16
    // 16 sums of `count` products in one DotSum; each product has 64 bytes of w and 4 of a
    void (*dot)(bool wide, int count, const int32_t* acc, const uint8_t* w, const int8_t* a, int32_t* out);
    // 16 sums of four products with one load of 16 inputs; each product has 64 bytes of w
    void (*dot_lanes)(bool wide, const int32_t* acc, const uint8_t* w, const int8_t* a, int32_t* out);
    void (*dot_bf16)(const float* acc, const uint16_t* w, const uint16_t* x, float* out);  // 16 sums, 32 of w
    void (*prefetch)(const void* p);

    // vec_math.h
    void (*exp)(const float* x, int n, float* out);
    void (*silu)(const float* x, int n, float* out);
    void (*tanh)(const float* x, int n, float* out);
    void (*gelu_tanh)(const float* x, int n, float* out);
    float (*sum_lanes)(const float* x);  // of 16
    float (*max_lanes)(const float* x);

    // softmax.h
    void (*multiply_add)(const float* x, const float* y, const float* z, int n, float* out);
    void (*add_pairs)(const float* sum, const uint16_t* w, const uint16_t* x, float* out);
    void (*choose)(uint32_t bits, const float* y, const float* z, float* out);  // 16
    float (*top_lane)(const float* x);                                          // of 16
    void (*store_and_sum)(const float* x, int n, uint16_t* out, float* sum);    // sum: 16
    void (*exp2)(const float* x, int n, float* out);

    // scan.h: 16 lanes
    uint32_t (*at_least)(const float* x, const float* y);
    uint32_t (*above)(const float* x, const float* y);
    uint32_t (*equal)(const float* x, const float* y);
    uint32_t (*below)(const uint32_t* x, const uint32_t* y);
    void (*min_u32)(const uint32_t* x, const uint32_t* y, uint32_t* out);
    void (*unsigned_f32)(const uint32_t* x, int n, float* out);
    void (*widen)(const float* x, double* out);  // low halves and high ones
    void (*max_f64)(const double* x, const double* y, double* out);
    void (*fma_f64)(const double* x, const double* y, const double* z, double* out);
    void (*mul_low)(const uint64_t* x, const uint64_t* y, uint64_t* out);
    void (*even_low)(const uint64_t* x, const uint64_t* y, uint32_t* out);  // 8 and 8 -> 16
    void (*interleave)(bool high, int width, const uint32_t* x, const uint32_t* y, uint32_t* out);
    int (*compress_f32)(uint32_t lanes, const float* x, float* out);  // vector by vector; returns the count
    int (*compress_i32)(uint32_t lanes, const int32_t* x, int32_t* out);
    void (*set_words)(uint32_t x, uint32_t* out, uint64_t y, uint64_t* out64, double z, double* out_f64);  // one vector
    float (*max_lane)(const float* x);  // of one vector
};

#define HEADRACE_DECLARE_SHIM(isa) \
    namespace isa {                \
    extern const VecShim vec_shim; \
    }

HEADRACE_DECLARE_SHIM(plain)
#if defined(HEADRACE_X86)
HEADRACE_DECLARE_SHIM(avx2)
HEADRACE_DECLARE_SHIM(avxvnni)
HEADRACE_DECLARE_SHIM(avx512vnni)
HEADRACE_DECLARE_SHIM(avx512)
#elif defined(HEADRACE_ARM)
HEADRACE_DECLARE_SHIM(neon)
HEADRACE_DECLARE_SHIM(i8mm)
#endif

}  // namespace headrace
