// The functions of vec_shim.h for one instruction set.
#include "vec_shim.h"

#include "vec/scan.h"
#include "vec/softmax.h"

namespace headrace::HEADRACE_ISA {

#define EACH(n) for (int i = 0; i < (n); i += kLanes)
#define EACH_HALF(n) for (int i = 0; i < (n); i += kHalf)

template <class V, class T>
HEADRACE_INLINE V vector_at(const T* p) {
    V x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

template <class T, class V>
HEADRACE_INLINE void put(T* p, V x) {
    __builtin_memcpy(p, &x, sizeof x);
}

HEADRACE_INLINE Lanes16 sixteen(const float* x) {
    Lanes16 lanes;
    EACH(16) lanes.part[i / kLanes] = load_f32(x + i);
    return lanes;
}

template <int bits, int from, int to>
static void move_field(const uint8_t* x, uint8_t* out) {
    for (int i = 0; i < 64; i += 4 * kLanes) store_u8(out + i, field<bits, from, to>(load_u8(x + i)));
}

// Runs field number bits * 64 + from * 8 + to, searched from `code` down.
template <int code>
static void find_field(int wanted, const uint8_t* x, uint8_t* out) {
    constexpr int bits = code / 64, from = code / 8 % 8, to = code % 8;
    if constexpr (from + bits <= 8 && to + bits <= 8) {
        if (wanted == code) return move_field<bits, from, to>(x, out);
    }
    if constexpr (code > 64) find_field<code - 1>(wanted, x, out);
}

template <bool wide>
static void dots(int count, const int32_t* acc, const uint8_t* w, const int8_t* a, int32_t* out) {
    EACH(16) {
        DotSum sum = dot_begin(load_i32(acc + i));
        for (int j = 0; j < count; ++j) {
            const U8v bytes = load_u8(w + 64 * j + 4 * i);
            sum = dot_add<wide>(sum, wide ? wide_bytes(bytes) : bytes, a + 4 * j);
        }
        put(out + i, dot_end(load_i32(acc + i), sum));
    }
}

template <bool wide, int lane>
static I32v add_lanes(I32v acc, const uint8_t* w, Inputs inputs) {
    const U8v bytes = load_u8(w + 64 * lane);
    acc = dot_end(acc, dot_lane<wide, lane>(dot_begin(acc), wide ? wide_bytes(bytes) : bytes, inputs));
    if constexpr (lane < 3) return add_lanes<wide, lane + 1>(acc, w, inputs);
    return acc;
}

template <bool wide>
static void dot_lanes(const int32_t* acc, const uint8_t* w, const int8_t* a, int32_t* out) {
    for (int i = 0; i < 16; i += kLanes) put(out + i, add_lanes<wide, 0>(load_i32(acc + i), w + 4 * i, load_inputs(a)));
}

template <bool high, int width>
static void interleaved(const uint32_t* x, const uint32_t* y, uint32_t* out) {
    EACH(16) put(out + i, interleave<high, width>(vector_at<U32v>(x + i), vector_at<U32v>(y + i)));
}

#define FLOATS1(of_x)                       \
    [](const float* p, int n, float* out) { \
        EACH(n) {                           \
            const F32v x = load_f32(p + i); \
            store_f32(out + i, of_x);       \
        }                                   \
    }
#define FLOATS2(of_xy)                                           \
    [](const float* p, const float* q, int n, float* out) {      \
        EACH(n) {                                                \
            const F32v x = load_f32(p + i), y = load_f32(q + i); \
            store_f32(out + i, of_xy);                           \
        }                                                        \
    }
#define FLOATS3(of_xyz)                                                               \
    [](const float* p, const float* q, const float* r, int n, float* out) {           \
        EACH(n) {                                                                     \
            const F32v x = load_f32(p + i), y = load_f32(q + i), z = load_f32(r + i); \
            store_f32(out + i, of_xyz);                                               \
        }                                                                             \
    }
#define BITS(compare)                                                    \
    [](const float* x, const float* y) {                                 \
        uint32_t bits = 0;                                               \
        EACH(16) bits |= compare(load_f32(x + i), load_f32(y + i)) << i; \
        return bits;                                                     \
    }

// A separate static variable: lambdas in the extern variable vec_shim would be weak symbols.
static constexpr VecShim kFunctions = {
    .lanes = kLanes,
    .wide_zero = kWideZero,
    .dot_room = [](int most) { return dot_room(most); },

    .copy = FLOATS1(x),
    .load_part = [](const float* p, int count, float* out) { store_f32(out, load_f32(p, count)); },
    .store_part = [](const float* x, int count, float* p) { store_f32(p, load_f32(x), count); },
    .set_f32 = [](float x, float* out) { store_f32(out, set_f32(x)); },
    .fma = FLOATS3(fma(x, y, z)),
    .max = FLOATS2(max(x, y)),
    .min = FLOATS2(min(x, y)),
    .as_i32 =
        [](const float* x, int n, int32_t* out) {
            EACH(n)
            put(out + i, as_i32(load_f32(x + i)));
        },
    .as_f32 =
        [](const int32_t* x, int n, float* out) {
            EACH(n)
            store_f32(out + i, as_f32(load_i32(x + i)));
        },
    .to_f32 =
        [](const int32_t* x, int n, float* out) {
            EACH(n)
            store_f32(out + i, to_f32(load_i32(x + i)));
        },
    .round_i32 =
        [](const float* x, int n, int32_t* out) {
            EACH(n)
            put(out + i, round_i32(load_f32(x + i)));
        },
    .load_f16 =
        [](const uint16_t* x, int n, float* out) {
            EACH(n)
            store_f32(out + i, load_f16(x + i));
        },
    .load_bf16 =
        [](const uint16_t* x, int n, float* out) {
            EACH(n)
            store_f32(out + i, load_bf16(x + i));
        },
    .store_bf16 =
        [](const float* x, int n, uint16_t* out) {
            EACH(n)
            store_bf16(out + i, load_f32(x + i));
        },
    .load_i8_f32 =
        [](const int8_t* x, int n, float* out) {
            EACH(n)
            store_f32(out + i, load_i8_f32(x + i));
        },
    .load_u8_f32 =
        [](const uint8_t* x, int n, float* out) {
            EACH(n)
            store_f32(out + i, load_u8_f32(x + i));
        },

    .load_u8_i32 =
        [](const uint8_t* x, int n, int32_t* out) {
            EACH(n)
            put(out + i, load_u8_i32(x + i));
        },
    .set_i32 = [](int32_t x, int32_t* out) { put(out, set_i32(x)); },
    .shift_left =
        [](const int32_t* x, int count, int n, int32_t* out) {
            EACH(n)
            put(out + i, shift_left(load_i32(x + i), count));
        },
    .max_ints =
        [](const int32_t* x, const int32_t* y, int n, int32_t* out) {
            EACH(n)
            put(out + i, max(load_i32(x + i), load_i32(y + i)));
        },
    .max_i32 = [](const int32_t* x) { return max_i32(load_i32(x)); },
    .sum_i32 = [](const int32_t* x) { return sum_i32(load_i32(x)); },
    .store_i8 =
        [](const int32_t* x, int n, int8_t* out) {
            EACH(n)
            store_i8(out + i, load_i32(x + i));
        },
#if HEADRACE_LANES == 16
    .store_i8_sums =
        [](const int32_t* x, int8_t* out, int32_t* sums) {
            const I32v both[2] = {load_i32(x), load_i32(x + 16)};
            store_i8_sums(out, both, sums);
        },
#else
    .store_i8_sums = nullptr,
#endif

    .copy_bytes =
        [](const uint8_t* x, uint8_t* out) {
            for (int i = 0; i < 64; i += 4 * kLanes) store_u8(out + i, load_u8(x + i));
        },
    .field = [](int bits, int from, int to, const uint8_t* x,
                uint8_t* out) { find_field<8 * 64>(bits * 64 + from * 8 + to, x, out); },
    .lookup =
        [](const uint8_t* table, const uint8_t* index, uint8_t* out) {
            for (int i = 0; i < 64; i += 4 * kLanes) store_u8(out + i, lookup(load_table(table), load_u8(index + i)));
        },
    .pick =
        [](const int32_t* eight, const int32_t* index, int32_t* out) {
            EACH(16)
            store_u8(out + i, (U8v)pick(eight, load_i32(index + i)));
        },
    .dot = [](bool wide, int count, const int32_t* acc, const uint8_t* w, const int8_t* a,
              int32_t* out) { wide ? dots<true>(count, acc, w, a, out) : dots<false>(count, acc, w, a, out); },
    .dot_lanes = [](bool wide, const int32_t* acc, const uint8_t* w, const int8_t* a,
                    int32_t* out) { wide ? dot_lanes<true>(acc, w, a, out) : dot_lanes<false>(acc, w, a, out); },
    .dot_bf16 =
        [](const float* acc, const uint16_t* w, const uint16_t* x, float* out) {
            EACH(16)
            store_f32(out + i, dot_bf16(load_f32(acc + i), load_u8(w + 2 * i), x));
        },
    .prefetch =
        [](const void* p) {
            prefetch(p);
            prefetch_l2(p);
        },

    .exp = FLOATS1(exp(x)),
    .silu = FLOATS1(silu(x)),
    .tanh = FLOATS1(tanh(x)),
    .gelu_tanh = FLOATS1(gelu_tanh(x)),
    .sum_lanes = [](const float* x) { return sum_lanes(sixteen(x)); },
    .max_lanes = [](const float* x) { return max_lanes(sixteen(x)); },

    .multiply_add = FLOATS3(multiply_add(x, y, z)),
    .add_pairs =
        [](const float* sum, const uint16_t* w, const uint16_t* x, float* out) {
            EACH(16)
            store_f32(out + i, add_pairs(load_f32(sum + i), load_u8(w + 2 * i), x));
        },
    .choose =
        [](uint32_t bits, const float* y, const float* z, float* out) {
            EACH(16)
            store_f32(out + i, choose(bits >> i, load_f32(y + i), load_f32(z + i)));
        },
    .top_lane = [](const float* x) { return top_lane(sixteen(x)); },
    .store_and_sum =
        [](const float* x, int n, uint16_t* out, float* sum) {
            Lanes16 lanes = zero_lanes();
            EACH(n) lanes.part[i % 16 / kLanes] = store_and_sum(out + i, load_f32(x + i), lanes.part[i % 16 / kLanes]);
            EACH(16) store_f32(sum + i, lanes.part[i / kLanes]);
        },
    .exp2 = FLOATS1(exp2(x)),

    .at_least = BITS(at_least),
    .above = BITS(above),
    .equal = BITS(equal),
    .below =
        [](const uint32_t* x, const uint32_t* y) {
            uint32_t bits = 0;
            EACH(16) bits |= below(vector_at<U32v>(x + i), vector_at<U32v>(y + i)) << i;
            return bits;
        },
    .min_u32 =
        [](const uint32_t* x, const uint32_t* y, uint32_t* out) {
            EACH(16)
            put(out + i, min_u32(vector_at<U32v>(x + i), vector_at<U32v>(y + i)));
        },
    .unsigned_f32 =
        [](const uint32_t* x, int n, float* out) {
            EACH(n)
            store_f32(out + i, unsigned_f32(vector_at<U32v>(x + i)));
        },
    .widen =
        [](const float* x, double* out) {
            EACH(16) {
                put(out + i, widen_low(load_f32(x + i)));
                put(out + i + kHalf, widen_high(load_f32(x + i)));
            }
        },
    .max_f64 =
        [](const double* x, const double* y, double* out) {
            EACH_HALF(16)
            put(out + i, max_f64(vector_at<F64v>(x + i), vector_at<F64v>(y + i)));
        },
    .fma_f64 =
        [](const double* x, const double* y, const double* z, double* out) {
            EACH_HALF(16)
            put(out + i, fma_f64(vector_at<F64v>(x + i), vector_at<F64v>(y + i), vector_at<F64v>(z + i)));
        },
    .mul_low =
        [](const uint64_t* x, const uint64_t* y, uint64_t* out) {
            EACH_HALF(16) put(out + i, mul_low(vector_at<U64v>(x + i), vector_at<U64v>(y + i)));
        },
    .even_low =
        [](const uint64_t* x, const uint64_t* y, uint32_t* out) {
            EACH_HALF(8) put(out + 2 * i, even_low(vector_at<U64v>(x + i), vector_at<U64v>(y + i)));
        },
    .interleave =
        [](bool high, int width, const uint32_t* x, const uint32_t* y, uint32_t* out) {
            if (width == 1) {
                high ? interleaved<true, 1>(x, y, out) : interleaved<false, 1>(x, y, out);
            } else {
                high ? interleaved<true, 2>(x, y, out) : interleaved<false, 2>(x, y, out);
            }
        },
    .compress_f32 =
        [](uint32_t lanes, const float* x, float* out) {
            int count = 0;
            EACH(16) {
                const uint32_t some = lanes >> i & ((1u << kLanes) - 1);
                compress_f32(out + count, some, load_f32(x + i));
                count += __builtin_popcount(some);
            }
            return count;
        },
    .compress_i32 =
        [](uint32_t lanes, const int32_t* x, int32_t* out) {
            int count = 0;
            EACH(16) {
                const uint32_t some = lanes >> i & ((1u << kLanes) - 1);
                compress_i32(out + count, some, load_i32(x + i));
                count += __builtin_popcount(some);
            }
            return count;
        },
    .set_words =
        [](uint32_t x, uint32_t* out, uint64_t y, uint64_t* out64, double z, double* out_f64) {
            put(out, set_u32(x));
            put(out64, set_u64(y));
            put(out_f64, set_f64(z));
        },
    .max_lane = [](const float* x) { return max_lane(load_f32(x)); },
};

extern const VecShim vec_shim;
const VecShim vec_shim = kFunctions;

}  // namespace headrace::HEADRACE_ISA
