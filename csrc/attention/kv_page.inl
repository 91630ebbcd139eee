// Writing K and V into pages (norm, rotation, rounding, scattered stores), and reading and copying single tokens.
#pragma once

#include "attention/kernels.h"
#include "vec/softmax.h"

namespace headrace::HEADRACE_ISA {

HEADRACE_INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

HEADRACE_INLINE float from_bf16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    __builtin_memcpy(&y, &bits, 4);
    return y;
}

HEADRACE_INLINE void round_to_bf16(const float* x, int n, uint16_t* out) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store_bf16(out + i, load_f32(x + i));
    for (; i < n; ++i) out[i] = to_bf16(x[i]);
}

HEADRACE_INLINE void fetch(const void* from, int bytes) {
    for (int i = 0; i < bytes; i += 64) prefetch((const uint8_t*)from + i);
}

HEADRACE_INLINE void copy_values(const float* x, int n, float* out) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store_f32(out + i, load_f32(x + i));
    for (; i < n; ++i) out[i] = x[i];
}

// Prepares one head of a query or key: RMS norm (if `norm`), rotation by its position, zero padding to `padded` values.
HEADRACE_INLINE void prepare_head(const float* x, const KVShape& kv, const float* norm, float eps,
                                  const RopeTable& rope, int32_t position, float* out) {
    const int dim = kv.dim;
    float factor = 1.0f;
    if (norm) {
        Lanes16 squares = zero_lanes();
        for (int i = 0; i < dim; i += 16) {
            for (int p = 0; p < Lanes16::kParts; ++p) {
                const int at = i + p * kLanes, count = dim - at < kLanes ? dim - at : kLanes;
                if (count <= 0) continue;
                const F32v part = load_f32(x + at, count);
                squares.part[p] = multiply_add(part, part, squares.part[p]);
            }
        }
        factor = 1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)dim + eps);
    }
    const float* from = x;
    if (norm) {
        int i = 0;
        for (; i + kLanes <= dim; i += kLanes)
            store_f32(out + i, load_f32(x + i) * set_f32(factor) * load_f32(norm + i));
        for (; i < dim; ++i) out[i] = x[i] * factor * norm[i];
        from = out;
    }
    for (int i = dim; i < kv.padded; ++i) out[i] = 0.0f;
    const int half = rope.cos ? rope.dim / 2 : 0, step = rope.interleaved ? 2 : 1, apart = rope.interleaved ? 1 : half;
    const float *c = nullptr, *s = nullptr;
    if (rope.cos) c = rope.cos + (int64_t)position * half, s = rope.sin + (int64_t)position * half;
    int i = 0;
    for (; !rope.interleaved && i + kLanes <= half; i += kLanes) {
        const F32v x0 = load_f32(from + i), x1 = load_f32(from + half + i), cos = load_f32(c + i),
                   sin = load_f32(s + i);
        store_f32(out + i, x0 * cos - x1 * sin);
        store_f32(out + half + i, x1 * cos + x0 * sin);
    }
    if (!norm) {  // what is not rotated yet
        copy_values(x + i, half - i, out + i);
        copy_values(x + half + i, dim - half - i, out + half + i);
    }
    for (; i < half; ++i) {
        float *a = out + i * step, *b = a + apart;
        const float x0 = *a, x1 = *b;
        *a = x0 * c[i] - x1 * s[i];
        *b = x1 * c[i] + x0 * s[i];
    }
}

// Rounds the n values of one token to bytes with offset 128; returns their scale, NaN if a value is not finite.
HEADRACE_INLINE float quantize_token(const float* x, int n, uint8_t* out) {
    float largest = 0.0f;
    bool finite = true;
    for (int i = 0; i < n; ++i) {
        const float size = x[i] < 0 ? -x[i] : x[i];
        finite &= size <= __FLT_MAX__;
        largest = size > largest ? size : largest;
    }
    const float inverse = finite && largest > 1e-35f ? 127.0f / largest : 0.0f;
    for (int i = 0; i < n; ++i) {
        const float scaled = x[i] * inverse;  // NaN if x[i] is not finite; the scale is NaN then
        out[i] = (uint8_t)(128 + (scaled == scaled ? (int)__builtin_rintf(scaled) : 0));
    }
    return !finite ? __builtin_nanf("") : inverse == 0.0f ? 0.0f : largest / 127.0f;
}

// Rounds n values to integers 0 to 15 above a minimum. Stores their scale in scale[0] and the minimum in scale[16],
// both as bfloat16.
HEADRACE_INLINE void quantize_range(const float* x, int n, uint8_t* out, uint16_t* scale) {
    float low = x[0], high = x[0];
    bool finite = true;
    for (int i = 0; i < n; ++i) {
        finite &= (x[i] < 0 ? -x[i] : x[i]) <= __FLT_MAX__;
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const float nan = __builtin_nanf(""), least = finite ? from_bf16(to_bf16(low)) : nan;
    const float step = finite ? from_bf16(to_bf16((high - least) / 15.0f)) : nan;
    const float inverse = step > 1e-35f ? 1.0f / step : 0.0f;
    for (int i = 0; i < n; ++i) {
        const float scaled = (x[i] - least) * inverse, held = scaled > 0.0f ? scaled < 15.0f ? scaled : 15.0f : 0.0f;
        out[i] = (uint8_t)__builtin_rintf(held);
    }
    scale[0] = to_bf16(finite && step <= 1e-35f ? 0.0f : step);  // infinite if the range exceeds float32
    scale[16] = to_bf16(least);
}

// The low or high half of a byte.
HEADRACE_INLINE uint8_t get_nibble(uint8_t byte, int high) { return (uint8_t)(byte >> 4 * high & 15); }
HEADRACE_INLINE void put_nibble(uint8_t* byte, int high, uint8_t x) {
    *byte = (uint8_t)((*byte & (0xf0 >> 4 * high)) | x << 4 * high);
}

// `room`: 4 * padded bytes, 64-byte aligned.
static void write_token(const KVShape& kv, uint8_t* page, int slot, const float* k, const float* v, uint8_t* room) {
    uint8_t* values = page + kv.half_bytes;
    const int dp = kv.padded;
    if (kv.type == KVType::kBf16) {
        uint16_t* rounded = (uint16_t*)room;
        round_to_bf16(k, dp, rounded);
        round_to_bf16(v, dp, rounded + dp);
        for (int d = 0; d < dp; d += 2) __builtin_memcpy(page + 32 * d + 4 * slot, rounded + d, 4);
        // Whole vectors of V: a later vector load can then be forwarded from the store.
        const bool odd = slot % 2;
        int32_t* line = (int32_t*)(values + slot / 2 * 4 * dp);
        for (int d = 0; d < dp; d += kLanes) {
            const I32v high = as_i32(load_bf16(rounded + dp + d)), low = high >> 16 & 0xffff, old = load_i32(line + d);
            store_f32((float*)line + d, as_f32(odd ? high | (old & 0xffff) : low | (old & ~0xffff)));
        }
    } else if (kv.type == KVType::kF32) {
        float *to_k = (float*)page + slot, *to_v = (float*)values + slot * dp;
        for (int d = 0; d < dp; ++d) to_k[16 * d] = k[d], to_v[d] = v[d];
    } else if (kv.type == KVType::kInt4) {
        uint16_t* scales = (uint16_t*)(page + kv.scales_offset()) + slot;
        quantize_range(k, dp / 2, room, scales);
        quantize_range(k + dp / 2, dp / 2, room + dp / 2, scales + 32);
        quantize_range(v, dp, room + dp, scales + 64);
        uint8_t *to_k = page + 4 * slot, *to_v = values + slot / 8 * 4 * dp + slot % 4;
        for (int d = 0; d < dp; d += 8)
            for (int i = d; i < d + 4; ++i) to_k[8 * d + i % 4] = (uint8_t)(room[i] | room[i + 4] << 4);
        for (int d = 0; d < dp; ++d) put_nibble(to_v + 4 * d, slot / 4 % 2, room[dp + d]);
    } else {
        float* scales = (float*)(page + kv.scales_offset()) + slot;
        scales[0] = quantize_token(k, dp, room);
        scales[16] = quantize_token(v, dp, room + dp);
        uint8_t *to_k = page + 4 * slot, *to_v = values + slot / 4 * 4 * dp + slot % 4;
        for (int d = 0; d < dp; d += 4) __builtin_memcpy(to_k + 16 * d, room + d, 4);
        for (int d = 0; d < dp; ++d) to_v[4 * d] = room[dp + d];
    }
}

static void read_token(const KVShape& kv, const uint8_t* page, int slot, float* k, float* v) {
    const uint8_t* values = page + kv.half_bytes;
    const int dp = kv.padded;
    for (int d = 0; d < kv.dim; ++d) {
        if (kv.type == KVType::kBf16) {
            k[d] = from_bf16(((const uint16_t*)page)[d / 2 * 32 + 2 * slot + d % 2]);
            v[d] = from_bf16(((const uint16_t*)values)[slot / 2 * 2 * dp + 2 * d + slot % 2]);
        } else if (kv.type == KVType::kF32) {
            k[d] = ((const float*)page)[d * 16 + slot];
            v[d] = ((const float*)values)[slot * dp + d];
        } else if (kv.type == KVType::kInt4) {
            const uint16_t *scales = (const uint16_t*)(page + kv.scales_offset()) + slot, *of_v = scales + 64;
            const uint16_t* of_k = scales + (d < dp / 2 ? 0 : 32);
            const uint8_t key = get_nibble(page[d / 8 * 64 + 4 * slot + d % 4], d / 4 % 2);
            const uint8_t value = get_nibble(values[slot / 8 * 4 * dp + 4 * d + slot % 4], slot / 4 % 2);
            k[d] = from_bf16(of_k[16]) + from_bf16(of_k[0]) * (float)key;
            v[d] = from_bf16(of_v[16]) + from_bf16(of_v[0]) * (float)value;
        } else {
            const float* scales = (const float*)(page + kv.scales_offset()) + slot;
            k[d] = scales[0] * (float)(page[d / 4 * 64 + 4 * slot + d % 4] - 128);
            v[d] = scales[16] * (float)(values[slot / 4 * 4 * dp + 4 * d + slot % 4] - 128);
        }
    }
}

// Copies a token: four bytes of every line of K, its part of every dimension of V, and its scales.
static void copy_token(const KVShape& kv, const uint8_t* from, int from_slot, uint8_t* to, int to_slot) {
    const int deep = kv.deep(), from_half = from_slot / 4 % 2, to_half = to_slot / 4 % 2;
    for (int line = 0; line < kv.padded / deep; ++line)
        __builtin_memcpy(to + 64 * line + 4 * to_slot, from + 64 * line + 4 * from_slot, 4);
    const uint8_t* values = from + kv.half_bytes + from_slot / deep * kv.padded * 4;
    uint8_t* out = to + kv.half_bytes + to_slot / deep * kv.padded * 4;
    for (int d = 0; d < kv.padded; ++d, values += 4, out += 4) {
        if (deep == 1) __builtin_memcpy(out, values, 4);
        if (deep == 2) __builtin_memcpy(out + to_slot % 2 * 2, values + from_slot % 2 * 2, 2);
        if (deep == 4) out[to_slot % 4] = values[from_slot % 4];
        if (deep == 8) put_nibble(out + to_slot % 4, to_half, get_nibble(values[from_slot % 4], from_half));
    }
    const int rows = kv.type == KVType::kInt8 ? 2 : kv.type == KVType::kInt4 ? 6 : 0, size = rows == 6 ? 2 : 4;
    for (int i = 0; i < rows; ++i) {
        const int scales = kv.scales_offset() + i * kPageTokens * size;
        __builtin_memcpy(to + scales + size * to_slot, from + scales + size * from_slot, (size_t)size);
    }
}

// Whether the pool can store all values of v [padded] as finite numbers.
HEADRACE_INLINE bool keeps(const KVShape& kv, const float* v) {
    // bfloat16: smallest float that rounds to infinity. int4: the range, at most twice the largest value, must be
    // finite.
    const float limit = kv.type == KVType::kBf16 ? 0x1.ffp127f : kv.type == KVType::kInt4 ? 0x1p126f : __builtin_inff();
    int32_t bound;
    __builtin_memcpy(&bound, &limit, 4);
    I32v sizes = set_i32(0);  // absolute values as bits: these sort finite values, then infinity, then NaN
    for (int d = 0; d < kv.padded; d += kLanes) sizes = max(sizes, as_i32(load_f32(v + d)) & 0x7fffffff);
    return max_i32(sizes) < bound;
}

// Moves a value that is not finite to the token's key: K = NaN, V = 0. A row replaces the scores of tokens that it does
// not see, but multiplies their values by weight 0, and 0 * NaN is NaN. With the NaN in the key, exactly the rows that
// see the token get NaN, whatever draft or chunk the token came in.
HEADRACE_INLINE void poison(const KVShape& kv, float* k, float* v) {
    for (int d = 0; d < kv.dim; ++d) k[d] = __builtin_nanf(""), v[d] = 0.0f;
}

static void append(const AttentionTask& task, int feed_index, int kv_head, int first, int last, float* scratch) {
    const KVShape& kv = task.kv;
    const AttentionFeed& feed = task.feeds[feed_index];
    float *k = scratch, *v = scratch + kv.padded;
    uint8_t* room = (uint8_t*)(v + kv.padded);
    const RopeTable none{};
    for (int i = first; i < last; ++i) {
        const int row = feed.row + i, index = feed.kv_start + i, slot = index % kPageTokens;
        uint8_t* page = task.pool + kv.page_offset(task.page_table[feed.pages + index / kPageTokens], kv_head);
        if (i + 1 < last) {  // these rows may be in the cache of the core that wrote them
            fetch(task.k + (row + 1) * task.stride + kv_head * kv.dim, kv.dim * 4);
            fetch(task.v + (row + 1) * task.stride + kv_head * kv.dim, kv.dim * 4);
        }
        prepare_head(task.k + row * task.stride + kv_head * kv.dim, kv, task.k_norm, task.norm_eps, task.rope,
                     task.positions[row], k);
        for (int d = 0; task.k_shift && d < kv.dim; ++d) k[d] -= task.k_shift[kv_head * kv.dim + d];
        prepare_head(task.v + row * task.stride + kv_head * kv.dim, kv, nullptr, 0.0f, none, 0, v);
        if (!keeps(kv, v)) poison(kv, k, v);
        write_token(kv, page, slot, k, v, room);
    }
}

// Rounds and stores one token's K and V of one head. `scratch`: 4 * padded floats.
static void write_rounded(const KVShape& kv, uint8_t* page, int slot, const float* k, const float* v, float* scratch) {
    prepare_head(k, kv, nullptr, 0.0f, {}, 0, scratch);
    prepare_head(v, kv, nullptr, 0.0f, {}, 0, scratch + kv.padded);
    if (!keeps(kv, scratch + kv.padded)) poison(kv, scratch, scratch + kv.padded);
    write_token(kv, page, slot, scratch, scratch + kv.padded, (uint8_t*)(scratch + 2 * kv.padded));
}

}  // namespace headrace::HEADRACE_ISA
