// Page format of the KV pool: a page holds 16 tokens of one KV head, in the order in which attention multiplies them.
#pragma once

#include <stdint.h>

namespace headrace {

constexpr int kPageTokens = 16;

enum class KVType : int32_t { kBf16, kInt8, kF32, kInt4 };

static inline int kv_bits(KVType type) {
    return type == KVType::kF32 ? 32 : type == KVType::kBf16 ? 16 : type == KVType::kInt8 ? 8 : 4;
}

// A page is K, then V, then scales. `padded` is the head size rounded up to 16, with zeros.
//   kBf16   K [padded / 2][16 tokens][2]   V [8 pairs of tokens][padded][2]
//   kInt8   K [padded / 4][16 tokens][4]   V [4 quads of tokens][padded][4]   as round(x / scale) + 128
//   kInt4   K [padded / 8][16 tokens][8]   V [2 octets of tokens][padded][8]  as round((x - least) / scale), 0 to 15
//   kF32    K [padded][16 tokens]          V [16 tokens][padded]
// So a vector of K is 16 tokens, a vector of V is 16 dimensions, and no product needs a sum across lanes. kInt4: of
// eight 4-bit numbers, the first four are the low nibbles of four bytes.
//
// Scales, one per token. kInt8, float32: 16 of K, then 16 of V. kInt4, bfloat16: 16 scales and 16 minima of the first
// half of K's dimensions, then of the second half, then of V.
struct KVShape {
    KVType type;
    int32_t heads;
    int32_t dim;
    int32_t padded;
    int32_t half_bytes;  // bytes of K in a page, and of V
    int32_t page_bytes;

    int64_t page_offset(int64_t page, int head) const { return (page * heads + head) * page_bytes; }
    int32_t scales_offset() const { return 2 * half_bytes; }
    // Numbers in four bytes.
    int32_t deep() const { return 32 / kv_bits(type); }
};

static inline KVShape kv_shape(KVType type, int heads, int dim) {
    const int padded = (dim + 15) / 16 * 16;
    const int half = padded * kPageTokens / 8 * kv_bits(type);
    const int scales = type == KVType::kInt8 ? 128 : type == KVType::kInt4 ? 192 : 0;
    return {type, heads, dim, padded, half, 2 * half + scales};
}

}  // namespace headrace
