// Decoding of stored rows to integers and scales. Block layouts follow the GGUF specification (ggml-org/ggml docs).
// Exceptions: NF4 and FP4 (half d, then nibbles in the order of IQ4_NL), S4 and S8 (half d, 2-bit indices, kept
// integers), G4_32, G4_128, G8_32 and G8_128 (half d, zero point, nibbles or bytes), and C8 (as Q8_0). A decoder writes
// a block's columns to q[row] and its scales to the header at index `row`.
#pragma once

#include "linear/tile.h"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

struct Staged {
    uint8_t q[16][256];  // [row][column of the block], unsigned with offset
    uint8_t* header;     // header of the packed block; by_row: of the row block
    bool first;          // of a row's blocks
};

HEADRACE_INLINE void put16(uint8_t* header, int index, const uint8_t* from) {
    __builtin_memcpy(header + 2 * index, from, 2);
}

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

// 16 bytes to 32 columns: first the low nibbles, then the high ones. As vectors, because compilers turn the loop into
// single-byte code.
HEADRACE_INLINE void decode_nibbles(const uint8_t* src, uint8_t* q) {
    Bytes16 both;
    __builtin_memcpy(&both, src, 16);
    const Bytes16 low = both & 15, high = both >> 4;
    __builtin_memcpy(q, &low, 16);
    __builtin_memcpy(q + 16, &high, 16);
}

// Adds bit 4 of 32 columns from a 32-bit word, eight columns at once: copies a byte to eight bytes and keeps one bit in
// each.
HEADRACE_INLINE void add_fifth_bits(const uint8_t* src, uint8_t* q) {
    for (int i = 0; i < 4; ++i) {
        const uint64_t kept = (src[i] * 0x0101010101010101u) & 0x8040201008040201u;
        const uint64_t fifth = ((kept + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u) >> 3;
        uint64_t eight;
        __builtin_memcpy(&eight, q + 8 * i, 8);
        eight |= fifth;
        __builtin_memcpy(q + 8 * i, &eight, 8);
    }
}

// Formats of 32 columns per scale. If the row ends in the middle of a block, group 1 keeps scale 0.
template <PackedKind kind>
HEADRACE_INLINE void decode_legacy(const uint8_t* src, int row, int groups, Staged& to) {
    constexpr bool has_min = layout_of(kind).has_min(), fifth = kind == PackedKind::kQ5_0 || kind == PackedKind::kQ5_1;
    constexpr int scales = has_min ? 4 : 2, bits = fifth ? 4 : 0,
                  bytes = scales + bits + (kind == PackedKind::kQ8_0 ? 32 : 16);
    for (int g = 0; g < groups; ++g, src += bytes) {
        put16(to.header, g * 16 + row, src);
        if (has_min) put16(to.header, 32 + g * 16 + row, src + 2);
        uint8_t* q = to.q[row] + 32 * g;
        if (kind == PackedKind::kQ8_0) {
            for (int i = 0; i < 32; ++i) q[i] = src[2 + i] ^ 0x80;
        } else {
            decode_nibbles(src + scales + bits, q);
            if (fifth) add_fifth_bits(src + scales, q);
        }
    }
}

// 2^(e - 128) as a half; NaN, which the scale check rejects, if a half cannot represent it.
HEADRACE_INLINE uint16_t half_power(int e) {
    const int power = e - 128;
    if (power < -24 || power > 15) return 0x7e00;
    return (uint16_t)(power < -14 ? 1 << (power + 24) : (power + 15) << 10);
}

// A block of zeros may have any scale, so it is stored with scale 0.
HEADRACE_INLINE void decode_mxfp4(const uint8_t* src, int row, int groups, Staged& to) {
    for (int g = 0; g < groups; ++g, src += 17) {
        int any = 0;
        for (int i = 1; i < 17; ++i) any |= src[i] & 0x77;
        const uint16_t d = any ? half_power(src[0]) : 0;
        put16(to.header, g * 16 + row, (const uint8_t*)&d);
        decode_nibbles(src + 1, to.q[row] + 32 * g);
    }
}

// 2:4 formats: writes the kept signed integers to q[0..16) of a group, and the pattern of quad j to q[16 + j]. If
// indices do not ascend, the scale becomes NaN, which the scale check rejects.
template <PackedKind kind>
HEADRACE_INLINE void decode_sparse(const uint8_t* src, int row, int groups, Staged& to) {
    constexpr int kept = layout_of(kind).low * 2;
    for (int g = 0; g < groups; ++g, src += 6 + kept) {
        uint8_t* q = to.q[row] + 32 * g;
        uint16_t d;
        __builtin_memcpy(&d, src, 2);
        for (int j = 0; j < 8; ++j) {
            const int pattern = pattern_of(src[2 + j / 2] >> (j % 2 * 4) & 15);
            if (pattern < 0) d = 0x7e00;
            q[16 + j] = pattern < 0 ? 0 : pattern;
        }
        put16(to.header, g * 16 + row, (const uint8_t*)&d);
        for (int i = 0; i < 16; ++i) {
            q[i] = kind == PackedKind::kS8 ? src[6 + i] : (src[6 + i % 8] >> (i / 8 * 4) & 15) ^ 8;
        }
    }
}

// 4-bit formats with zero points: writes nibbles, and zero - zero point to the header. If the zero point is larger than
// `zero`, the scale becomes NaN, which the scale check rejects.
template <PackedKind kind>
HEADRACE_INLINE void decode_points(const uint8_t* src, int row, int groups, Staged& to) {
    constexpr Layout layout = layout_of(kind);
    constexpr int spans = layout.spans(), each = layout.span / 32;
    for (int s = 0; s < spans && s * each < groups; ++s, src += 3 + 16 * each) {
        uint16_t d;
        __builtin_memcpy(&d, src, 2);
        if (src[2] > layout.zero) d = 0x7e00;
        put16(to.header, s * 16 + row, (const uint8_t*)&d);
        to.header[32 * spans + 16 * s + row] = (uint8_t)(layout.zero - src[2]);
        for (int g = 0; g < each; ++g) decode_nibbles(src + 3 + 16 * g, to.q[row] + 32 * (s * each + g));
    }
}

// 8-bit formats with zero points: writes bytes, and the zero points to the header.
template <PackedKind kind>
HEADRACE_INLINE void decode_wide_points(const uint8_t* src, int row, int groups, Staged& to) {
    constexpr Layout layout = layout_of(kind);
    constexpr int spans = layout.spans(), span = layout.span;
    for (int s = 0; s < spans && s * span / 32 < groups; ++s, src += 3 + span) {
        put16(to.header, s * 16 + row, src);
        to.header[32 * spans + 16 * s + row] = src[2];
        __builtin_memcpy(to.q[row] + s * span, src + 3, span);
    }
}

// One scale for all blocks of a row. If they differ, it becomes NaN, which the scale check rejects.
HEADRACE_INLINE void decode_row(const uint8_t* src, int row, int groups, Staged& to) {
    uint8_t* scale = to.header + 2 * row;
    for (int g = 0; g < groups; ++g, src += 34) {
        if (to.first && g == 0) put16(to.header, row, src);
        const uint16_t broken = 0x7e00;
        if (__builtin_memcmp(scale, src, 2) != 0) __builtin_memcpy(scale, &broken, 2);
        for (int i = 0; i < 32; ++i) to.q[row][32 * g + i] = src[2 + i] ^ 0x80;
    }
}

// Unpacks the eight 6-bit scales and minima of Q4_K and Q5_K from 12 bytes.
HEADRACE_INLINE void decode_scales6(const uint8_t* src, int row, uint8_t* scales, uint8_t* mins) {
    for (int j = 0; j < 4; ++j) {
        scales[j * 16 + row] = src[j] & 63;
        mins[j * 16 + row] = src[j + 4] & 63;
        scales[(j + 4) * 16 + row] = (src[j + 8] & 15) | (src[j] >> 6) << 4;
        mins[(j + 4) * 16 + row] = (src[j + 8] >> 4) | (src[j + 4] >> 6) << 4;
    }
}

template <bool fifth>
HEADRACE_INLINE void decode_q45k(const uint8_t* src, int row, Staged& to) {
    put16(to.header, row, src);
    put16(to.header, 16 + row, src + 2);
    decode_scales6(src + 4, row, to.header + 64, to.header + 192);
    const uint8_t *high = src + 16, *low = src + (fifth ? 48 : 16);
    for (int g = 0; g < 8; ++g) {
        for (int i = 0; i < 32; ++i) {
            uint8_t q = low[g / 2 * 32 + i] >> (g % 2 * 4) & 15;
            if (fifth) q |= (high[i] >> g & 1) << 4;
            to.q[row][g * 32 + i] = q;
        }
    }
}

HEADRACE_INLINE void decode_q6k(const uint8_t* src, int row, Staged& to) {
    put16(to.header, row, src + 208);
    for (int s = 0; s < 16; ++s) to.header[32 + s * 16 + row] = src[192 + s];
    for (int half = 0; half < 2; ++half) {
        const uint8_t *low = src + half * 64, *high = src + 128 + half * 32;
        for (int part = 0; part < 4; ++part) {
            for (int i = 0; i < 32; ++i) {
                const int nibble = low[part % 2 * 32 + i] >> (part / 2 * 4) & 15;
                to.q[row][half * 128 + part * 32 + i] = nibble | (high[i] >> (2 * part) & 3) << 4;
            }
        }
    }
}

HEADRACE_INLINE void decode_q3k(const uint8_t* src, int row, Staged& to) {
    const uint8_t *high = src, *low = src + 32, *scales = src + 96;
    put16(to.header, row, src + 108);
    for (int s = 0; s < 16; ++s) {
        const int six = (scales[s % 8] >> (s / 8 * 4) & 15) | (scales[8 + s % 4] >> (s / 4 * 2) & 3) << 4;
        to.header[32 + s * 16 + row] = (uint8_t)(six - 32);
    }
    for (int g = 0; g < 8; ++g) {
        for (int i = 0; i < 32; ++i) {
            const int two = low[g / 4 * 32 + i] >> (g % 4 * 2) & 3;
            to.q[row][g * 32 + i] = two | (high[i] >> g & 1) << 2;
        }
    }
}

HEADRACE_INLINE void decode_q2k(const uint8_t* src, int row, Staged& to) {
    put16(to.header, row, src + 80);
    put16(to.header, 16 + row, src + 82);
    for (int s = 0; s < 16; ++s) to.header[64 + s * 16 + row] = src[s];
    for (int g = 0; g < 8; ++g) {
        for (int i = 0; i < 32; ++i) to.q[row][g * 32 + i] = src[16 + g / 4 * 32 + i] >> (g % 4 * 2) & 3;
    }
}

HEADRACE_INLINE void decode_iq4xs(const uint8_t* src, int row, Staged& to) {
    put16(to.header, row, src);
    const int high = src[2] | src[3] << 8;
    for (int g = 0; g < 8; ++g) {
        const int six = (src[4 + g / 2] >> (g % 2 * 4) & 15) | (high >> (2 * g) & 3) << 4;
        to.header[32 + g * 16 + row] = (uint8_t)(six - 32);
        decode_nibbles(src + 8 + g * 16, to.q[row] + g * 32);
    }
}

// Source bytes of one row of a packed block.
static constexpr int source_block_bytes(PackedKind kind) {
    switch (kind) {
        case PackedKind::kQ4_0:
        case PackedKind::kIq4Nl:
        case PackedKind::kNf4:
        case PackedKind::kFp4:
            return 36;
        case PackedKind::kMxfp4:
            return 34;
        case PackedKind::kQ4_1:
            return 40;
        case PackedKind::kQ5_0:
            return 44;
        case PackedKind::kQ5_1:
            return 48;
        case PackedKind::kQ8_0:
        case PackedKind::kC8:
            return 68;
        case PackedKind::kQ2K:
            return 84;
        case PackedKind::kQ3K:
            return 110;
        case PackedKind::kQ4K:
            return 144;
        case PackedKind::kQ5K:
            return 176;
        case PackedKind::kQ6K:
            return 210;
        case PackedKind::kIq4Xs:
            return 136;
        case PackedKind::kS4:
            return 28;
        case PackedKind::kS8:
            return 44;
        case PackedKind::kG4_32:
            return 38;
        case PackedKind::kG4_128:
            return 67;
        case PackedKind::kG8_32:
            return 70;
        case PackedKind::kG8_128:
            return 131;
        default:
            return 0;
    }
}

// Decodes one row of a block. `groups`: remaining groups of 32 columns in the row; blocks of 256 columns are always
// complete.
template <PackedKind kind>
HEADRACE_INLINE void decode_block(const uint8_t* src, int row, int groups, Staged& to) {
    if constexpr (kind == PackedKind::kQ2K) {
        decode_q2k(src, row, to);
    } else if constexpr (kind == PackedKind::kQ3K) {
        decode_q3k(src, row, to);
    } else if constexpr (kind == PackedKind::kQ4K) {
        decode_q45k<false>(src, row, to);
    } else if constexpr (kind == PackedKind::kQ5K) {
        decode_q45k<true>(src, row, to);
    } else if constexpr (kind == PackedKind::kQ6K) {
        decode_q6k(src, row, to);
    } else if constexpr (kind == PackedKind::kIq4Xs) {
        decode_iq4xs(src, row, to);
    } else if constexpr (kind == PackedKind::kMxfp4) {
        decode_mxfp4(src, row, groups < 2 ? groups : 2, to);
    } else if constexpr (layout_of(kind).point()) {
        decode_points<kind>(src, row, groups, to);
    } else if constexpr (layout_of(kind).wide_point()) {
        decode_wide_points<kind>(src, row, groups, to);
    } else if constexpr (layout_of(kind).by_row()) {
        decode_row(src, row, groups < 2 ? groups : 2, to);
    } else if constexpr (layout_of(kind).sparse) {
        decode_sparse<kind>(src, row, groups < 2 ? groups : 2, to);
    } else {
        decode_legacy<kind>(src, row, groups < 2 ? groups : 2, to);
    }
}

}  // namespace headrace::HEADRACE_ISA
