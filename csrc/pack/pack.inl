// Packing of rows into tiles, and unpacking of rows. Compiled per instruction set only for speed: the bytes are the
// same on all.
#pragma once

#include "pack/decode.inl"
#include "pack/kernels.h"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

// Stores the kept integers of a 2:4 block as planes of quads, then the patterns.
template <PackedKind kind>
HEADRACE_INLINE void store_sparse(const Staged& from, uint8_t* integers) {
    constexpr Layout layout = layout_of(kind);
    constexpr int low = layout.low, vectors = low / 2;
    for (int g = 0; g < 2; ++g, integers += layout.group_bytes()) {
        __builtin_memset(integers, 0, layout.group_bytes());
        for (int row = 0; row < 16; ++row) {
            const uint8_t* q = from.q[row] + 32 * g;
            for (int i = 0; i < 16; ++i) {
                integers[64 * (i / 4 % vectors) + 4 * row + i % 4] |= q[i] << (low * (i / 4 / vectors));
            }
            for (int j = 0; j < 8; ++j) integers[64 * vectors + 4 * row + j / 2] |= q[16 + j] << (j % 2 * 4);
        }
    }
}

// Stores a block's integers: arranges the columns as quads, then splits them into bit planes.
template <PackedKind kind>
HEADRACE_INLINE void store_block(const Staged& from, uint8_t* integers) {
    constexpr Layout layout = layout_of(kind);
    constexpr int low = layout.low, high = layout.high;
    if constexpr (layout.sparse) return store_sparse<kind>(from, integers);
    for (int g = 0; g < 2 * layout.tiles(); ++g, integers += layout.group_bytes()) {
        uint8_t quad[8][64];
        for (int row = 0; row < 16; ++row) {
            for (int j = 0; j < 8; ++j) __builtin_memcpy(quad[j] + 4 * row, from.q[row] + 32 * g + 4 * j, 4);
        }
        for (int v = 0; v < low; ++v) {
            for (int i = 0; i < 64; ++i) {
                uint8_t byte = 0;
                for (int f = 0; f < 8 / low; ++f) byte |= (quad[v + f * low][i] & ((1 << low) - 1)) << (f * low);
                integers[64 * v + i] = byte;
            }
        }
        if constexpr (high > 0) {
            for (int v = 0; v < high; ++v) {
                for (int i = 0; i < 64; ++i) {
                    uint8_t byte = 0;
                    for (int f = 0; f < 8 / high; ++f) byte |= (quad[v + f * high][i] >> low) << (f * high);
                    integers[64 * (low + v) + i] = byte;
                }
            }
        }
    }
}

HEADRACE_INLINE const uint8_t* source_row(const PackSource& source, int row) {
    const int64_t index = source.permutation ? source.permutation[row] : row;
    return source.rows + index * source.row_bytes;
}

template <PackedKind kind>
static void pack_blocks(const PackSource& source, const PackedTensor& out, uint8_t* data, int first, int last) {
    constexpr Layout layout = layout_of(kind);
    const int blocks = (out.tiles() + layout.tiles() - 1) / layout.tiles();
    for (int rb = first; rb < last; ++rb) {
        const int rows = out.n - rb * 16 < 16 ? out.n - rb * 16 : 16;
        for (int b = 0; b < blocks; ++b) {
            Staged staged;
            if (rows < 16 || b == blocks - 1) __builtin_memset(staged.q, 0, sizeof staged.q);
            uint8_t *whole = data + rb * out.stride, *block = whole + layout.prefix_bytes() + b * layout.block_bytes();
            staged.header = layout.by_row() ? whole : block;
            staged.first = b == 0;
            for (int row = 0; row < rows; ++row) {
                const uint8_t* src = source_row(source, rb * 16 + row) + (int64_t)b * source_block_bytes(kind);
                decode_block<kind>(src, row, out.k / 32 - 2 * b, staged);
            }
            store_block<kind>(staged, block + layout.header_bytes());
        }
    }
}

static constexpr int element_bytes(SourceKind kind) { return kind == SourceKind::kF32 ? 4 : 2; }

// Converts `count` source values to float32, padded with zeros to 64.
HEADRACE_INLINE void load_floats(SourceKind kind, const uint8_t* src, int count, float* out) {
    uint8_t raw[256];
    if (count < 64) {
        __builtin_memset(raw, 0, sizeof raw);
        __builtin_memcpy(raw, src, (size_t)count * element_bytes(kind));
        src = raw;
    }
    for (int i = 0; i < 64; i += kLanes) {
        F32v x;
        if (kind == SourceKind::kF32) {
            x = load_f32((const float*)(src + 4 * i));
        } else {
            x = kind == SourceKind::kF16 ? load_f16((const uint16_t*)(src + 2 * i))
                                         : load_bf16((const uint16_t*)(src + 2 * i));
        }
        store_f32(out + i, x);
    }
}

// Converts a scale from float32 to f16, nearest even. x must not be negative zero.
HEADRACE_INLINE uint16_t half_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size >= 0x477ff000) return sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00);  // rounds past 65504; NaN
    if (size < 0x38800000) {                                                      // subnormal half, in units of 2^-24
        float units = 0;
        __builtin_memcpy(&units, &size, 4);
        units = units * 0x1p24f + 8388608.0f;  // the sum rounds to nearest even
        __builtin_memcpy(&bits, &units, 4);
        return sign | (bits & 0x7fffff);
    }
    return sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10));
}

HEADRACE_INLINE float half_value(uint16_t half) {
    const uint16_t four[16] = {half};
    float lanes[kLanes];
    store_f32(lanes, load_f16(four));
    return lanes[0];
}

HEADRACE_INLINE int nearest(float x) { return (int)__builtin_rintf(x); }

HEADRACE_INLINE uint16_t quantize_int8(const float* w, uint8_t* q) {
    float largest = 0;
    for (int i = 0; i < 32; ++i) largest = __builtin_fabsf(w[i]) > largest ? __builtin_fabsf(w[i]) : largest;
    const uint16_t half = half_bits(largest / 127.0f);
    const float d = half_value(half), inverse = d > 0 ? 1.0f / d : 0.0f;
    for (int i = 0; i < 32; ++i) {
        const float scaled = w[i] * inverse;
        q[i] = (uint8_t)(nearest(scaled > 127.0f ? 127.0f : scaled < -127.0f ? -127.0f : scaled) + 128);
    }
    return half;
}

// Quantizes 32 weights with scale d. Returns the squared error.
HEADRACE_INLINE float quantize_int4_at(const float* w, float d, uint8_t* q) {
    const float inverse = d != 0 ? 1.0f / d : 0.0f;
    float error[32], sum = 0;
    for (int i = 0; i < 32; ++i) {
        float scaled = w[i] * inverse;
        scaled = scaled > 7.0f ? 7.0f : scaled < -8.0f ? -8.0f : scaled;
        const float rounded = (scaled + 12582912.0f) - 12582912.0f;  // nearest even
        q[i] = (uint8_t)((int)rounded + 8);
        error[i] = w[i] - rounded * d;
    }
    for (int i = 0; i < 32; ++i) sum += error[i] * error[i];
    return sum;
}

HEADRACE_INLINE uint16_t quantize_int4(const float* w, uint8_t* q) {
    float extreme = 0, least = 0;
    for (int i = 0; i < 32; ++i) extreme = __builtin_fabsf(w[i]) > __builtin_fabsf(extreme) ? w[i] : extreme;
    uint16_t best = 0;
    for (int step = 0; step <= 12; ++step) {
        uint8_t trial[32];
        const uint16_t half = half_bits(extreme / -(7.0f + 0.125f * (float)step));
        const float error = quantize_int4_at(w, half_value(half), trial);
        if (step == 0 || error < least) {
            least = error;
            best = half;
            __builtin_memcpy(q, trial, 32);
        }
    }
    return best;
}

HEADRACE_INLINE void put_bf16(const float* w, int row, uint8_t* tile) {
    uint16_t narrow[64];
    for (int i = 0; i < 64; i += kLanes) store_bf16(narrow + i, load_f32(w + i));
    for (int v = 0; v < 32; ++v) __builtin_memcpy(tile + 64 * v + 4 * row, narrow + 2 * v, 4);
}

// Packs a float source as bfloat16, or quantizes it to kQ8_0 or kQ4_0.
template <PackedKind kind>
static void pack_floats(const PackSource& source, const PackedTensor& out, uint8_t* data, int first, int last) {
    constexpr Layout layout = layout_of(kind);
    for (int rb = first; rb < last; ++rb) {
        const int rows = out.n - rb * 16 < 16 ? out.n - rb * 16 : 16;
        for (int t = 0; t < out.tiles(); ++t) {
            Staged staged;
            __builtin_memset(staged.q, 0, sizeof staged.q);
            uint8_t* block = data + rb * out.stride + (int64_t)t * layout.block_bytes();
            const int count = out.k - 64 * t < 64 ? out.k - 64 * t : 64;
            for (int row = 0; row < rows; ++row) {
                const int64_t offset = (int64_t)64 * t * element_bytes(source.kind);
                float w[64];
                load_floats(source.kind, source_row(source, rb * 16 + row) + offset, count, w);
                if constexpr (kind == PackedKind::kBf16) put_bf16(w, row, block);
                if constexpr (kind != PackedKind::kBf16) {
                    for (int g = 0; g < 2; ++g) {
                        uint8_t* q = staged.q[row] + 32 * g;
                        const uint16_t d =
                            kind == PackedKind::kQ8_0 ? quantize_int8(w + 32 * g, q) : quantize_int4(w + 32 * g, q);
                        __builtin_memcpy(block + 2 * (16 * g + row), &d, 2);
                    }
                }
            }
            if constexpr (kind != PackedKind::kBf16) store_block<kind>(staged, block + layout.header_bytes());
        }
    }
}

static void pack(const PackSource& source, const PackedTensor& out, uint8_t* data, int first, int last) {
    if (is_float(source.kind)) {
        if (out.kind == PackedKind::kQ8_0) return pack_floats<PackedKind::kQ8_0>(source, out, data, first, last);
        if (out.kind == PackedKind::kQ4_0) return pack_floats<PackedKind::kQ4_0>(source, out, data, first, last);
        return pack_floats<PackedKind::kBf16>(source, out, data, first, last);
    }
    switch (out.kind) {
#define HEADRACE_CASE(kind) \
    case PackedKind::kind:  \
        return pack_blocks<PackedKind::kind>(source, out, data, first, last);
        HEADRACE_INTEGER_KINDS(HEADRACE_CASE)
#undef HEADRACE_CASE
        case PackedKind::kBf16:
            return;
    }
}

// Scale and addend of a row for 16 columns, group `group16` of a block: w = scale * q + addend.
template <PackedKind kind>
HEADRACE_INLINE void row_scales(const uint8_t* header, int group16, int row, float& scale, float& addend) {
    constexpr Scales scales = layout_of(kind).scales;
    const int group32 = group16 / 2;
    uint16_t d, m = 0;
    constexpr bool one = layout_of(kind).super() || layout_of(kind).by_row();
    const int d_index = one ? row : group32 * 32 / layout_of(kind).span * 16 + row;
    __builtin_memcpy(&d, header + 2 * d_index, 2);
    scale = half_value(d);
    addend = 0;
    if (scales == Scales::kMin32) {
        __builtin_memcpy(&m, header + 2 * (32 + d_index), 2);
        addend = half_value(m);
    } else if (scales == Scales::kSuper32 || scales == Scales::kSuper16Min) {
        __builtin_memcpy(&m, header + 2 * (16 + row), 2);
        const int packed = header[64 + (scales == Scales::kSuper32 ? group32 : group16) * 16 + row];
        const int factor = scales == Scales::kSuper32 ? packed : packed & 15;
        const int min = scales == Scales::kSuper32 ? header[192 + group32 * 16 + row] : packed >> 4;
        scale *= (float)factor;
        addend = -(half_value(m) * (float)min);
    } else if (scales == Scales::kSuper16 || scales == Scales::kSuperI8) {
        scale *= (float)(int8_t)header[32 + (scales == Scales::kSuper16 ? group16 : group32) * 16 + row];
    }
}

// The zero point of a row in group `group32` of a block.
template <PackedKind kind>
HEADRACE_INLINE int row_zero(const uint8_t* header, int group32, int row) {
    constexpr Layout layout = layout_of(kind);
    if (!layout.point() && !layout.wide_point()) return layout.zero;
    const int point = header[32 * layout.spans() + group32 * 32 / layout.span * 16 + row];
    return layout.point() ? layout.zero - point : point;
}

// Quad j of a row in a group of 32 columns: four integers as bytes.
template <PackedKind kind>
HEADRACE_INLINE void row_quad(const uint8_t* group, int j, int row, uint8_t* q) {
    constexpr int low = layout_of(kind).low, high = layout_of(kind).high;
    if constexpr (layout_of(kind).sparse) {
        constexpr int vectors = low / 2, zero = layout_of(kind).zero;
        const int pattern = group[64 * vectors + 4 * row + j / 2] >> (j % 2 * 4) & 7;
        for (int i = 0; i < 4; ++i) q[i] = zero;
        for (int i = 0; i < 2; ++i) {
            const uint8_t kept = group[64 * (j / 2 % vectors) + 4 * row + j % 2 * 2 + i] >> (low * (j / 2 / vectors));
            q[kPatterns[pattern][i]] = (kept & ((1 << low) - 1)) ^ zero;
        }
        return;
    }
    for (int i = 0; i < 4; ++i) {
        const int byte = 4 * row + i;
        q[i] = group[64 * (j % low) + byte] >> (low * (j / low)) & ((1 << low) - 1);
        if constexpr (high > 0) {
            q[i] |= (group[64 * (low + j % high) + byte] >> (high * (j / high)) & ((1 << high) - 1)) << low;
        }
    }
}

template <PackedKind kind>
static void unpack_blocks(const PackedTensor& tensor, int row, float* out) {
    constexpr Layout layout = layout_of(kind);
    const uint8_t* data = tensor.data + row / 16 * tensor.stride;
    for (int k = 0; k < tensor.k; k += 32) {
        const int group = k / 32 % (2 * layout.tiles());
        const auto [block, tile, inner] = place_of_tile(layout, data, k / 64);
        const uint8_t* integers = tile + k / 32 % 2 * layout.group_bytes();
        const int zero = row_zero<kind>(block, group, row % 16);
        for (int j = 0; j < 8; ++j) {
            float scale, addend;
            uint8_t q[4];
            row_scales<kind>(block, 2 * group + j / 4, row % 16, scale, addend);
            row_quad<kind>(integers, j, row % 16, q);
            for (int i = 0; i < 4 && k + 4 * j + i < tensor.k; ++i) {
                const int value = (layout.table ? table_of(kind)[q[i]] : q[i]) - zero;
                const float product = scale * (float)value;
                out[k + 4 * j + i] = layout.has_min() && !layout.wide_point() ? product + addend : product;
            }
        }
    }
}

static void unpack_bf16(const PackedTensor& tensor, int row, float* out) {
    const uint8_t* tiles = tensor.data + row / 16 * tensor.stride;
    for (int k = 0; k < tensor.k; ++k) {
        uint16_t bits;
        __builtin_memcpy(&bits, tiles + k / 64 * 2048 + k % 64 / 2 * 64 + row % 16 * 4 + k % 2 * 2, 2);
        const uint32_t wide = (uint32_t)bits << 16;
        __builtin_memcpy(out + k, &wide, 4);
    }
}

static void unpack(const PackedTensor& tensor, int row, float* out) {
    switch (tensor.kind) {
#define HEADRACE_CASE(kind) \
    case PackedKind::kind:  \
        return unpack_blocks<PackedKind::kind>(tensor, row, out);
        HEADRACE_INTEGER_KINDS(HEADRACE_CASE)
#undef HEADRACE_CASE
        case PackedKind::kBf16:
            return unpack_bf16(tensor, row, out);
    }
}

}  // namespace headrace::HEADRACE_ISA
