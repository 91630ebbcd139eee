// The products of attention: one struct per K/V format (Pool), and the loops for scores of a few rows with some pages
// of keys and for weighted sums of values. The other template arguments are register block sizes; no result depends on
// them.
//
// A line is 64 bytes: 16 tokens of K (or 16 dimensions of V) times kDeep dimensions (or tokens). A product with a line
// uses kDeep numbers of a row. A key has kHalves parts with a scale each. kTiles: the struct has its own functions for
// scores and values (attention/amx.inl).
#pragma once

#include "attention/kernels.h"
#include "attention/kv_page.inl"
#include "vec/softmax.h"

namespace headrace::HEADRACE_ISA {

constexpr int kParts = 16 / kLanes;  // vectors per line
constexpr int kMaxRows = kTuning.attention_rows, kMaxPages = kTuning.attention_pages;

// The pages of a chunk, and for each a page of the next chunk to prefetch.
struct ChunkPages {
    const uint8_t* page[kChunk / kPageTokens];
    const uint8_t* next[kChunk / kPageTokens];
    int count;
};

struct Bf16Pages {
    static constexpr int kDeep = 2, kRows = kMaxRows, kHalves = 1;
    static constexpr bool kScaled = false, kTiles = false;
    using Sum = F32v;
    struct Row {  // one row of numbers: a query, or the weights of a chunk
        const uint16_t* x;
    };
    struct Weights {
        uint16_t x[kRows][kChunk];
        Row row(int r) const { return {x[r]}; }
    };

    HEADRACE_INLINE F32v multiply(F32v sum, U8v line, Row row, int i) { return add_pairs(sum, line, row.x + i); }
    HEADRACE_INLINE F32v zero() { return set_f32(0.0f); }
    HEADRACE_INLINE Row query(const float* q, int) { return {(const uint16_t*)q}; }
    HEADRACE_INLINE F32v score(F32v sum, const float*, int) { return sum; }
    HEADRACE_INLINE F32v start(F32v o, float keep) { return o * set_f32(keep); }
    HEADRACE_INLINE F32v finish(F32v, F32v sum, float, const Weights&, int) { return sum; }

    static void prepare(const float* x, int dp, float* row) { round_to_bf16(x, dp, (uint16_t*)row); }
    // kScaled: applies the scales of a page's tokens to the scores.
    HEADRACE_INLINE F32v scale(F32v x, const float*, const uint8_t*, const KVShape&, int) { return x; }
    // Stores vector i of a row's weights, rounded to bfloat16. Sums the rounded weights, because the products use them.
    HEADRACE_INLINE void rescale(F32v weight, int i, const ChunkPages&, const KVShape&, int r, Weights& out,
                                 F32v& sum) {
        sum = store_and_sum(out.x[r] + i * kLanes, weight, sum);
    }
    HEADRACE_INLINE void quantize_weights(const ChunkPages&, int, Weights&) {}
};

struct F32Pages {
    static constexpr int kDeep = 1, kRows = kMaxRows, kHalves = 1;
    static constexpr bool kScaled = false, kTiles = false;
    using Sum = F32v;
    struct Row {
        const float* x;
    };
    struct Weights {
        float x[kRows][kChunk];
        Row row(int r) const { return {x[r]}; }
    };

    HEADRACE_INLINE F32v multiply(F32v sum, U8v line, Row row, int i) {
        return multiply_add((F32v)line, set_f32(row.x[i]), sum);
    }
    HEADRACE_INLINE F32v zero() { return set_f32(0.0f); }
    HEADRACE_INLINE Row query(const float* q, int) { return {q}; }
    HEADRACE_INLINE F32v score(F32v sum, const float*, int) { return sum; }
    HEADRACE_INLINE F32v start(F32v o, float keep) { return o * set_f32(keep); }
    HEADRACE_INLINE F32v finish(F32v, F32v sum, float, const Weights&, int) { return sum; }

    static void prepare(const float* x, int dp, float* row) { __builtin_memcpy(row, x, 4 * (size_t)dp); }
    HEADRACE_INLINE F32v scale(F32v x, const float*, const uint8_t*, const KVShape&, int) { return x; }
    HEADRACE_INLINE void rescale(F32v weight, int i, const ChunkPages&, const KVShape&, int r, Weights& out,
                                 F32v& sum) {
        store_f32(out.x[r] + i * kLanes, weight);
        sum = sum + weight;
    }
    HEADRACE_INLINE void quantize_weights(const ChunkPages&, int, Weights&) {}
};

// Keys and values are bytes with offset 128. Queries and weights have two signed bytes per number, high * 128 + low, so
// that their rounding is small next to that of K and V. Sums are exact integers.
struct Int8Pages {
    static constexpr int kDeep = 4, kRows = (kMaxRows + 1) / 2, kHalves = 1;
    static constexpr int kOffset = 128 - kWideZero;  // offset that the multiplied bytes still have
    static constexpr bool kScaled = true, kTiles = false;
    struct Sum {
        I32v high, low;
    };
    struct Row {
        const int8_t *high, *low;
    };
    struct Weights {
        float scaled[kRows][kChunk];  // weights times the values' scales
        int8_t high[kRows][kChunk], low[kRows][kChunk];
        int32_t offset[kRows];  // kOffset times the sum of the integers
        float unit[kRows];      // scale of the integers
        Row row(int r) const { return {high[r], low[r]}; }
    };

    HEADRACE_INLINE Sum multiply(Sum sum, U8v line, Row row, int i) {
        const U8v w = wide_bytes(line);
        return {dot<true>(sum.high, w, row.high + i), dot<true>(sum.low, w, row.low + i)};
    }
    HEADRACE_INLINE Sum zero() { return {set_i32(0), set_i32(0)}; }
    HEADRACE_INLINE I32v total(Sum sum, int32_t offset) { return (sum.high << 7) + sum.low - offset; }
    // A query in scratch: high [dp], low [dp], the scale of its integers, and kOffset times their sum.
    HEADRACE_INLINE Row query(const float* q, int dp) { return {(const int8_t*)q, (const int8_t*)q + dp}; }
    HEADRACE_INLINE F32v score(Sum sum, const float* q, int dp) {
        int32_t offset;
        __builtin_memcpy(&offset, q + dp / 2 + 1, 4);
        return to_f32(total(sum, offset));
    }
    HEADRACE_INLINE Sum start(F32v, float) { return zero(); }
    HEADRACE_INLINE F32v finish(F32v o, Sum sum, float keep, const Weights& weights, int r) {
        return multiply_add(to_f32(total(sum, weights.offset[r])), set_f32(weights.unit[r]), o * set_f32(keep));
    }

    // Rounds x * inverse to integers of two bytes each; returns their sum. n: a multiple of 16.
    HEADRACE_INLINE int32_t split(const float* x, int n, float inverse, int8_t* high, int8_t* low) {
        I32v sum = set_i32(0);
        for (int i = 0; i < n; i += kLanes) {
            const I32v q = round_i32(load_f32(x + i) * set_f32(inverse)), upper = (q + 64) >> 7;
            store_i8(high + i, upper);
            store_i8(low + i, q - (upper << 7));
            sum += q;
        }
        return sum_i32(sum);
    }
    static void prepare(const float* x, int dp, float* row) {
        float largest = 0.0f, poison = 0.0f;
        for (int d = 0; d < dp; ++d) {
            const float size = x[d] < 0 ? -x[d] : x[d];
            largest = size > largest ? size : largest;
            poison += x[d] - x[d];  // NaN unless all are finite
        }
        const bool finite = poison == 0.0f, tiny = !(largest > 1e-30f);
        const float inverse = finite && !tiny ? 16256.0f / largest : 0.0f;
        const int32_t offset = finite ? kOffset * split(x, dp, inverse, (int8_t*)row, (int8_t*)row + dp) : 0;
        row[dp / 2] = !finite ? poison : tiny ? 0.0f : largest / 16256.0f;
        __builtin_memcpy(row + dp / 2 + 1, &offset, 4);
    }
    HEADRACE_INLINE F32v scale(F32v x, const float* q, const uint8_t* page, const KVShape& kv, int part) {
        return x * set_f32(q[kv.padded / 2]) * load_f32((const float*)(page + kv.scales_offset()) + part * kLanes);
    }
    HEADRACE_INLINE void rescale(F32v weight, int i, const ChunkPages& chunk, const KVShape& kv, int r, Weights& out,
                                 F32v& sum) {
        const float* scales = (const float*)(chunk.page[i / kParts] + kv.scales_offset()) + kPageTokens;
        store_f32(out.scaled[r] + i * kLanes, weight * load_f32(scales + i % kParts * kLanes));
        sum = sum + weight;
    }
    HEADRACE_INLINE void quantize_weights(const ChunkPages& chunk, int r, Weights& out) {
        I32v largest =
            set_i32(0);  // maximum of the absolute values' bits as integers: NaN is the largest, so it is not lost
        for (int i = 0; i < chunk.count * kParts; ++i) {
            largest = max(largest, as_i32(load_f32(out.scaled[r] + i * kLanes)) & 0x7fffffff);
        }
        const int32_t bits = max_i32(largest);
        float top;
        __builtin_memcpy(&top, &bits, 4);
        const bool finite = bits < 0x7f800000, tiny = !(top > 1e-30f);
        const float inverse = finite && !tiny ? 16256.0f / top : 0.0f;
        out.offset[r] = kOffset * split(out.scaled[r], chunk.count * kPageTokens, inverse, out.high[r], out.low[r]);
        out.unit[r] = !finite ? __builtin_nanf("") : tiny ? 0.0f : top / 16256.0f;
    }
};

// Numbers are minimum + scale * code with 4-bit codes. Products with the codes work as in Int8Pages; the minima add
// minimum * (sum of the query or of the weights).
struct Int4Pages : Int8Pages {
    static constexpr int kDeep = 8, kHalves = 2;
    struct Weights : Int8Pages::Weights {
        float least[kRows][kChunk];  // weights times the values' minima
        float base[kRows];           // sum of `least`
    };

    HEADRACE_INLINE I32v add_codes(I32v sum, U8v low, U8v high, const int8_t* x) {
        return dot_end(sum, dot_add<false>(dot_add<false>(dot_begin(sum), low, x), high, x + 4));
    }
    HEADRACE_INLINE Sum multiply(Sum sum, U8v line, Row row, int i) {
        const U8v low = field<4, 0, 0>(line), high = field<4, 4, 0>(line);
        return {add_codes(sum.high, low, high, row.high + i), add_codes(sum.low, low, high, row.low + i)};
    }
    HEADRACE_INLINE F32v score(Sum sum, const float*, int) { return to_f32(total(sum, 0)); }
    // Adds the scores of one half of a key's dimensions to those `before`. The query stores the sum of the integers of
    // each half, for the minima.
    HEADRACE_INLINE F32v add_half(int half, F32v x, const float* q, const uint8_t* page, const KVShape& kv, int part,
                                  const float* before) {
        const uint16_t* scales = (const uint16_t*)(page + kv.scales_offset()) + 32 * half + part * kLanes;
        const F32v least = load_bf16(scales + kPageTokens) * set_f32(q[kv.padded / 2 + 1 + half]);
        const F32v own = multiply_add(x, load_bf16(scales), least);
        return half ? load_f32(before) + own : own;
    }
    HEADRACE_INLINE F32v finish(F32v o, Sum sum, float keep, const Weights& weights, int r) {
        const F32v rest = multiply_add(o, set_f32(keep), set_f32(weights.base[r]));
        return multiply_add(to_f32(total(sum, 0)), set_f32(weights.unit[r]), rest);
    }

    static void prepare(const float* x, int dp, float* row) {
        Int8Pages::prepare(x, dp, row);
        const int8_t *high = (const int8_t*)row, *low = high + dp;
        for (int half = 0, d = 0; half < 2; ++half) {
            int32_t sum = 0;
            for (; d < (half + 1) * dp / 2; ++d) sum += high[d] * 128 + low[d];
            row[dp / 2 + 1 + half] = (float)sum;
        }
    }
    HEADRACE_INLINE F32v scale(F32v x, const float* q, const uint8_t*, const KVShape& kv, int) {
        return x * set_f32(q[kv.padded / 2]);
    }
    HEADRACE_INLINE void rescale(F32v weight, int i, const ChunkPages& chunk, const KVShape& kv, int r, Weights& out,
                                 F32v& sum) {
        const uint16_t* scales = (const uint16_t*)(chunk.page[i / kParts] + kv.scales_offset()) + 4 * kPageTokens;
        scales += i % kParts * kLanes;
        store_f32(out.scaled[r] + i * kLanes, weight * load_bf16(scales));
        store_f32(out.least[r] + i * kLanes, weight * load_bf16(scales + kPageTokens));
        sum = sum + weight;
    }
    HEADRACE_INLINE void quantize_weights(const ChunkPages& chunk, int r, Weights& out) {
        Int8Pages::quantize_weights(chunk, r, out);
        Lanes16 base = zero_lanes();
        for (int i = 0; i < chunk.count * kParts; ++i)
            base.part[i % kParts] = base.part[i % kParts] + load_f32(out.least[r] + i * kLanes);
        out.base[r] = sum_lanes(base);
    }
};

// Products of rows q [rows][q_stride] with one half of the keys of pages [at, at + pages); out: [rows][kChunk].
template <class Pool, int rows, int pages, bool fetch>
HEADRACE_INLINE void half_scores(int half, const float* q, int q_stride, const KVShape& kv, const ChunkPages& chunk,
                                 int at, float* out) {
    typename Pool::Sum sum[rows][pages][kParts];
    typename Pool::Row row[rows];
    const int dp = kv.padded, width = dp / Pool::kHalves, first = half * width;
    for (int r = 0; r < rows; ++r) {
        row[r] = Pool::query(q + r * q_stride, dp);
        for (int b = 0; b < pages; ++b)
            for (int p = 0; p < kParts; ++p) sum[r][b][p] = Pool::zero();
    }
#pragma GCC unroll 1
    for (int d = first, line = first / Pool::kDeep * 64; d < first + width; d += Pool::kDeep, line += 64) {
#pragma GCC unroll 4
        for (int b = 0; b < pages; ++b) {
            if (fetch) prefetch(chunk.next[at + b] + line);
#pragma GCC unroll 4
            for (int p = 0; p < kParts; ++p) {
                const U8v key = load_u8(chunk.page[at + b] + line + p * 4 * kLanes);
#pragma GCC unroll 6
                for (int r = 0; r < rows; ++r) sum[r][b][p] = Pool::multiply(sum[r][b][p], key, row[r], d);
            }
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int b = 0; b < pages; ++b)
            for (int p = 0; p < kParts; ++p) {
                const float* query = q + r * q_stride;
                float* to = out + r * kChunk + b * 16 + p * kLanes;
                F32v x = Pool::score(sum[r][b][p], query, dp);
                if constexpr (Pool::kHalves == 2) x = Pool::add_half(half, x, query, chunk.page[at + b], kv, p, to);
                store_f32(to, x);
            }
}

// The same with all halves of the keys.
template <class Pool, int rows, int pages, bool fetch>
HEADRACE_INLINE void scores(const float* q, int q_stride, const KVShape& kv, const ChunkPages& chunk, int at,
                            float* out) {
#pragma GCC unroll 1
    for (int half = 0; half < Pool::kHalves; ++half)
        half_scores<Pool, rows, pages, fetch>(half, q, q_stride, kv, chunk, at, out);
}

// o = o * keep + weights * values, for `vectors` vectors of dimensions from dimension d on.
template <class Pool, int rows, int vectors, bool fetch>
HEADRACE_INLINE void values(const typename Pool::Weights& weights, const float* keep, const ChunkPages& chunk,
                            const KVShape& kv, int d, float* o, int o_stride) {
    typename Pool::Sum sum[rows][vectors];
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v) sum[r][v] = Pool::start(load_f32(o + r * o_stride + d + v * kLanes), keep[r]);
    const int stride = kv.padded * 4;
    for (int b = 0; b < chunk.count; ++b) {
        const uint8_t* from = chunk.page[b] + kv.half_bytes + d * 4;
        const uint8_t* next = chunk.next[b] + kv.half_bytes + d * 4;
#pragma GCC unroll 1
        for (int t = 0; t < kPageTokens; t += Pool::kDeep, from += stride, next += stride) {
            U8v value[vectors];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                value[v] = load_u8(from + v * 4 * kLanes);
                if (fetch && v % kParts == 0) prefetch(next + v * 4 * kLanes);
            }
#pragma GCC unroll 6
            for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) {
                    sum[r][v] = Pool::multiply(sum[r][v], value[v], weights.row(r), b * kPageTokens + t);
                }
            }
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v) {
            float* to = o + r * o_stride + d + v * kLanes;
            store_f32(to, Pool::finish(load_f32(to), sum[r][v], keep[r], weights, r));
        }
}

}  // namespace headrace::HEADRACE_ISA
