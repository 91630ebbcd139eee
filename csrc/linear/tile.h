// Packed weights: tiles of 16 output rows x 64 columns, with exactly the integers and scales of the source format.
//
// A row block is 16 rows over all columns: a contiguous sequence of blocks. A block covers `tiles` tiles (4 for formats
// with scales of scales per 256 columns, 2 for scales per 128 columns, otherwise 1): a header with the scales, then the
// integers. Integers are stored unsigned, with offset `zero`, in planes. A plane of b bits holds a group of 32 columns
// in b vectors of 64 bytes. Byte 4n + i of a vector belongs to row n and column 4j + i of the group; quad j = 0..7 is
// in vector j % b at bits [b * (j / b), b * (j / b) + b). A format's integer is low plane | high plane << low bits.
//
// 2:4 formats keep two of the four columns of every quad. A group has 16 kept signed integers of b bits in b / 2
// vectors: byte 4n + i belongs to row n and kept column 4p + i. Kept quad p = 0..3 holds the kept columns of quads 2p
// and 2p + 1 and is in vector p % (b / 2) at bits [b * (p / (b / 2)), ...). One more vector holds 32 bits per row: bits
// [4j, 4j + 4) are the index in kPatterns of quad j.
//
// kRow has no headers: a row block begins with d[16] in 64 bytes, and then come the integers of all its columns.
//
// Headers (each [16] is one value per row, f16 unless a type is given):
//   kZero32     d[2][16]                              w = d * (q - zero)
//   kMin32      d[2][16] m[2][16]                     w = d * q + m
//   kSuper32    d[16] dmin[16] u8 sc[8][16] u8 m[8][16]    w = (d * sc) * q - dmin * m
//   kSuper16    d[16] i8 sc[16][16]                   w = (d * sc) * (q - zero)
//   kSuper16Min d[16] dmin[16] u8 (sc | m << 4)[16][16]    w = (d * sc) * q - dmin * m
//   kSuperI8    d[16] i8 sc[8][16]                    w = (d * sc) * (q - zero)
//   kPoint      d[s][16] u8 p[s][16]                  w = d * (q + p - zero); s = 2, or 1 for spans of 128 columns;
//                                                     p = zero - zero point
//   kWidePoint  d[s][16] u8 p[s][16]                  w = d * (q - zero) + d * (zero - p); s as above; p: zero point.
//                                                     q - p does not fit a byte, so d * (zero - p) is a minimum
//   kRow        none; d[16] of all columns is at the beginning of the row block    w = d * (q - zero)
//   kNone       bfloat16 pairs: 32 vectors a tile, 2 columns x 16 rows each
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace headrace {

enum class PackedKind : int32_t {
    kQ4_0,
    kQ4_1,
    kQ5_0,
    kQ5_1,
    kQ8_0,
    kQ2K,
    kQ3K,
    kQ4K,
    kQ5K,
    kQ6K,
    kIq4Nl,
    kIq4Xs,
    kBf16,
    kMxfp4 = 15,  // 13 and 14 are SourceKind::kF16 and kF32
    kNf4,
    kFp4,
    kS4,
    kS8,
    kG4_32,
    kG4_128,
    kG8_32,
    kG8_128,
    kC8
};

// Kinds with their own direct kernels.
#define HEADRACE_DENSE_KINDS(X) \
    X(kQ4_0) X(kQ4_1) X(kQ5_0) X(kQ5_1) X(kQ8_0) X(kQ2K) X(kQ3K) X(kQ4K) X(kQ5K) X(kQ6K) X(kIq4Nl) X(kIq4Xs)
#define HEADRACE_KERNEL_KINDS(X) HEADRACE_DENSE_KINDS(X) X(kS4) X(kS8) X(kG4_32) X(kG4_128) X(kG8_32) X(kG8_128) X(kC8)
constexpr int kDenseKinds = 12, kKernelKinds = 19;
// All kinds except kBf16.
#define HEADRACE_INTEGER_KINDS(X) HEADRACE_KERNEL_KINDS(X) X(kMxfp4) X(kNf4) X(kFp4)

enum class Scales { kZero32, kMin32, kSuper32, kSuper16, kSuper16Min, kSuperI8, kPoint, kWidePoint, kRow, kNone };

struct Layout {
    int low, high;  // bits of the two planes
    bool table;     // the integer is an index into table_of, whose entries are multiplied
    Scales scales;
    int zero;             // a power of two; 0 for formats with minima, except kWidePoint
    bool sparse = false;  // 2:4
    int span = 32;        // kPoint, kWidePoint: columns per scale, 32 or 128

    constexpr bool point() const { return scales == Scales::kPoint; }
    constexpr bool wide_point() const { return scales == Scales::kWidePoint; }
    constexpr bool by_row() const { return scales == Scales::kRow; }
    constexpr bool super() const {
        return scales != Scales::kZero32 && scales != Scales::kMin32 && scales != Scales::kNone && !point() &&
               !wide_point() && !by_row();
    }
    constexpr int tiles() const { return super() ? 4 : span / 64 > 1 ? span / 64 : 1; }  // per block
    constexpr int spans() const { return 64 * tiles() / span; }                          // per block
    constexpr int group() const { return scales == Scales::kSuper16 || scales == Scales::kSuper16Min ? 16 : 32; }
    constexpr bool has_min() const {
        return scales == Scales::kMin32 || scales == Scales::kSuper32 || scales == Scales::kSuper16Min || wide_point();
    }
    constexpr bool wide() const { return table || low == 8; }  // multiplied bytes may be 128 or more
    constexpr int most() const {                               // largest byte that is multiplied
        return wide() ? 255 : point() ? 2 * zero - 1 : (1 << (low + high)) - 1;
    }
    constexpr int header_bytes() const {
        switch (scales) {
            case Scales::kZero32:
                return 64;
            case Scales::kMin32:
                return 128;
            case Scales::kSuperI8:
                return 192;
            case Scales::kPoint:
            case Scales::kWidePoint:
                return spans() * 64;
            case Scales::kRow:
            case Scales::kNone:
                return 0;
            default:
                return 320;
        }
    }
    constexpr int prefix_bytes() const { return by_row() ? 64 : 0; }  // at the beginning of a row block
    constexpr int group_bytes() const {                               // integers of 32 columns; 2:4: and their patterns
        return sparse ? low * 32 + 64 : (low + high) * 64;
    }
    constexpr int tile_bytes() const { return scales == Scales::kNone ? 2048 : 2 * group_bytes(); }
    constexpr int block_bytes() const { return header_bytes() + tiles() * tile_bytes(); }
};

static constexpr Layout layout_of(PackedKind kind) {
    switch (kind) {
        case PackedKind::kQ4_0:
            return {4, 0, false, Scales::kZero32, 8};
        case PackedKind::kQ4_1:
            return {4, 0, false, Scales::kMin32, 0};
        case PackedKind::kQ5_0:
            return {4, 1, false, Scales::kZero32, 16};
        case PackedKind::kQ5_1:
            return {4, 1, false, Scales::kMin32, 0};
        case PackedKind::kQ8_0:
            return {8, 0, false, Scales::kZero32, 128};
        case PackedKind::kQ2K:
            return {2, 0, false, Scales::kSuper16Min, 0};
        case PackedKind::kQ3K:
            return {2, 1, false, Scales::kSuper16, 4};
        case PackedKind::kQ4K:
            return {4, 0, false, Scales::kSuper32, 0};
        case PackedKind::kQ5K:
            return {4, 1, false, Scales::kSuper32, 0};
        case PackedKind::kQ6K:
            return {4, 2, false, Scales::kSuper16, 32};
        case PackedKind::kIq4Nl:
        case PackedKind::kMxfp4:
        case PackedKind::kNf4:
        case PackedKind::kFp4:
            return {4, 0, true, Scales::kZero32, 128};
        case PackedKind::kIq4Xs:
            return {4, 0, true, Scales::kSuperI8, 128};
        case PackedKind::kS4:
            return {4, 0, false, Scales::kZero32, 8, true};
        case PackedKind::kS8:
            return {8, 0, false, Scales::kZero32, 128, true};
        case PackedKind::kG4_32:
            return {4, 0, false, Scales::kPoint, 16};
        case PackedKind::kG4_128:
            return {4, 0, false, Scales::kPoint, 16, false, 128};
        case PackedKind::kG8_32:
            return {8, 0, false, Scales::kWidePoint, 128};
        case PackedKind::kG8_128:
            return {8, 0, false, Scales::kWidePoint, 128, false, 128};
        case PackedKind::kC8:
            return {8, 0, false, Scales::kRow, 128};
        default:
            return {0, 0, false, Scales::kNone, 0};
    }
}

// 2:4: the two kept columns of a quad, by pattern.
static constexpr int kPatterns[6][2] = {{0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3}};

// The pattern of two 2-bit column indices, the first in the low bits; -1 unless they ascend.
static constexpr int pattern_of(int indices) {
    for (int p = 0; p < 6; ++p) {
        if (indices == (kPatterns[p][0] | kPatterns[p][1] << 2)) return p;
    }
    return -1;
}

// The sixteen values of each table format, with offset 128: IQ4_NL and IQ4_XS; E2M1 times 2; bitsandbytes' NF4 times
// 123.26 and FP4 times 96, both rounded.
static constexpr uint8_t kIq4Table[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static constexpr uint8_t kMxfp4Table[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                            128, 127, 126, 125, 124, 122, 120, 116};
static constexpr uint8_t kNf4Table[16] = {5, 42, 63, 79, 93, 105, 117, 128, 138, 148, 158, 170, 182, 197, 217, 251};
static constexpr uint8_t kFp4Table[16] = {128, 129, 192, 224, 160, 176, 144, 152, 128, 127, 64, 32, 96, 80, 112, 104};

static constexpr const uint8_t* table_of(PackedKind kind) {
    return kind == PackedKind::kMxfp4 ? kMxfp4Table
           : kind == PackedKind::kNf4 ? kNf4Table
           : kind == PackedKind::kFp4 ? kFp4Table
                                      : kIq4Table;
}

// Index in HEADRACE_KERNEL_KINDS of the kind whose direct kernels this kind uses. Table formats of one layout share
// their kernels, because the table is an argument.
static constexpr int kernel_index(PackedKind kind) {
    if (kind >= PackedKind::kS4) return kDenseKinds + static_cast<int>(kind) - static_cast<int>(PackedKind::kS4);
    return static_cast<int>(kind > PackedKind::kBf16 ? PackedKind::kIq4Nl : kind);
}

// n rows of k columns. Rows past n and columns past k are stored as zeros.
struct PackedTensor {
    const uint8_t* data;  // row block b at data + b * stride, 64-byte aligned
    int64_t stride;       // bytes between row blocks: row_block_bytes, or more if two tensors are interleaved
    PackedKind kind;
    int32_t n, k;
    const float* bias;  // [row blocks * 16], or null

    int32_t row_blocks() const { return (n + 15) / 16; }
    int32_t tiles() const { return (k + 63) / 64; }
};

static constexpr int64_t row_block_bytes(PackedKind kind, int32_t k) {
    const Layout layout = layout_of(kind);
    const int64_t tiles = (k + 63) / 64;
    return layout.prefix_bytes() + (tiles + layout.tiles() - 1) / layout.tiles() * layout.block_bytes();
}

// A tile of a row block: the scales of its block (or of the row block), its integers, and its number within the block.
struct TilePlace {
    const uint8_t *scales, *integers;
    int inner;
};

static constexpr TilePlace place_of_tile(const Layout& layout, const uint8_t* data, int tile) {
    const uint8_t* block = data + layout.prefix_bytes() + (int64_t)(tile / layout.tiles()) * layout.block_bytes();
    const int inner = tile % layout.tiles();
    return {layout.by_row() ? data : block, block + layout.header_bytes() + inner * layout.tile_bytes(), inner};
}

}  // namespace headrace
