// Attention with K/V in bfloat16 on AMX. The left operand of a product is up to 16 queries, or their softmax weights.
// The right operand is a page of K ([dim / 2][16 tokens][2]) or of V ([8 pairs of tokens][dim][2]), as it is stored.
// The order of sums is the instruction's: scores add 32 dimensions at a time (even and odd ones from zero, then their
// sum), values 16 tokens. It does not depend on the number of rows.
#pragma once

#include "attention/pools.inl"
#include "vec/amx.h"

namespace headrace::HEADRACE_ISA {

struct AmxBf16Pages : Bf16Pages {
    static constexpr int kRows = 16;
    static constexpr bool kTiles = true;
    struct Weights {
        alignas(64) uint16_t x[kRows][kChunk];
    };

    HEADRACE_INLINE void rescale(F32v weight, int i, const ChunkPages&, const KVShape&, int r, Weights& out,
                                 F32v& sum) {
        sum = store_and_sum(out.x[r] + i * kLanes, weight, sum);
    }
    HEADRACE_INLINE void quantize_weights(const ChunkPages&, int, Weights&) {}

    // Tiles 0 to 3 are sums, 4 is 32 columns of the rows and 6 the other operand; 5 and 7 are the same for 16 columns.
    // `configured`: number of rows of the present shapes.
    HEADRACE_INLINE void use_rows(int rows, int& configured) {
        if (configured == rows) return;
        configured = rows;
        TileConfig config{};
        config.palette = 1;
        for (int i = 0; i < 8; ++i) config.rows[i] = (uint8_t)rows, config.bytes[i] = 64;
        config.bytes[5] = 32;
        config.rows[6] = 16, config.rows[7] = 8;
        tiles_configure(config);
    }

    template <int tile>
    HEADRACE_INLINE void score_page(const uint8_t* page, int d, bool whole) {
        if (whole) {
            tile_load<6>(page + 32 * d, 64);
            tile_dot_bf16<tile, 4, 6>();
        } else {
            tile_load<7>(page + 32 * d, 64);
            tile_dot_bf16<tile, 5, 7>();
        }
    }

    // Products of q with pages [at, at + pages); out: [rows][kChunk].
    template <int pages>
    HEADRACE_INLINE void score_pages(const float* q, int q_stride, const KVShape& kv, const ChunkPages& chunk, int at,
                                     float* out) {
        tile_zero<0>();
        if constexpr (pages > 1) tile_zero<1>();
        if constexpr (pages > 2) tile_zero<2>(), tile_zero<3>();
        for (int d = 0; d < kv.padded; d += 32) {
            const bool whole = d + 32 <= kv.padded;
            const uint16_t* from = (const uint16_t*)q + d;
            whole ? tile_load<4>(from, 4 * q_stride) : tile_load<5>(from, 4 * q_stride);
            score_page<0>(chunk.page[at], d, whole);
            if constexpr (pages > 1) score_page<1>(chunk.page[at + 1], d, whole);
            if constexpr (pages > 2) {
                score_page<2>(chunk.page[at + 2], d, whole);
                score_page<3>(chunk.page[at + 3], d, whole);
            }
        }
        tile_store<0>(out, 4 * kChunk);
        if constexpr (pages > 1) tile_store<1>(out + kPageTokens, 4 * kChunk);
        if constexpr (pages > 2) {
            tile_store<2>(out + 2 * kPageTokens, 4 * kChunk);
            tile_store<3>(out + 3 * kPageTokens, 4 * kChunk);
        }
    }

    template <bool fetch>
    HEADRACE_INLINE void scores(const float* q, int q_stride, const KVShape& kv, const ChunkPages& chunk, float* out) {
        for (int b = 0; fetch && b < chunk.count; ++b)
            for (int line = 0; line < kv.half_bytes; line += 64) prefetch(chunk.next[b] + line);
        int b = 0;
        for (; b + 4 <= chunk.count; b += 4) score_pages<4>(q, q_stride, kv, chunk, b, out + b * kPageTokens);
        if (b + 2 <= chunk.count) score_pages<2>(q, q_stride, kv, chunk, b, out + b * kPageTokens), b += 2;
        if (b < chunk.count) score_pages<1>(q, q_stride, kv, chunk, b, out + b * kPageTokens);
    }

    // o = o + weights * values, for `count` times 16 dimensions.
    template <int count>
    HEADRACE_INLINE void add_values(const Weights& weights, const ChunkPages& chunk, const KVShape& kv, int d, float* o,
                                    int o_stride) {
        tile_load<0>(o, 4 * o_stride);
        if constexpr (count > 1) tile_load<1>(o + 16, 4 * o_stride);
        if constexpr (count > 2) tile_load<2>(o + 32, 4 * o_stride), tile_load<3>(o + 48, 4 * o_stride);
        for (int b = 0; b < chunk.count; ++b) {
            const uint8_t* from = chunk.page[b] + kv.half_bytes + d * 4;
            tile_load<5>(weights.x[0] + b * kPageTokens, 2 * kChunk);
            tile_load<7>(from, 4 * kv.padded);
            tile_dot_bf16<0, 5, 7>();
            if constexpr (count > 1) tile_load<7>(from + 64, 4 * kv.padded), tile_dot_bf16<1, 5, 7>();
            if constexpr (count > 2) {
                tile_load<7>(from + 128, 4 * kv.padded), tile_dot_bf16<2, 5, 7>();
                tile_load<7>(from + 192, 4 * kv.padded), tile_dot_bf16<3, 5, 7>();
            }
        }
        tile_store<0>(o, 4 * o_stride);
        if constexpr (count > 1) tile_store<1>(o + 16, 4 * o_stride);
        if constexpr (count > 2) tile_store<2>(o + 32, 4 * o_stride), tile_store<3>(o + 48, 4 * o_stride);
    }

    // o = o * keep + weights * values.
    template <bool fetch>
    HEADRACE_INLINE void values(const Weights& weights, const float* keep, int rows, const ChunkPages& chunk,
                                const KVShape& kv, float* o, int o_stride) {
        for (int b = 0; fetch && b < chunk.count; ++b)
            for (int line = 0; line < kv.half_bytes; line += 64) prefetch(chunk.next[b] + kv.half_bytes + line);
        for (int r = 0; r < rows; ++r)
            for (int d = 0; d < kv.padded; d += kLanes)
                store_f32(o + r * o_stride + d, load_f32(o + r * o_stride + d) * set_f32(keep[r]));
        int d = 0;
        for (; d + 64 <= kv.padded; d += 64) add_values<4>(weights, chunk, kv, d, o + d, o_stride);
        if (d + 32 <= kv.padded) add_values<2>(weights, chunk, kv, d, o + d, o_stride), d += 32;
        if (d < kv.padded) add_values<1>(weights, chunk, kv, d, o + d, o_stride);
    }
};

}  // namespace headrace::HEADRACE_ISA
