// Block layouts of the GGUF specification (ggml-org/ggml, docs/gguf.md), and of formats that GGUF lacks
// (weights/kinds.py). Plain C++ that the compiler vectorizes. Every product and sum is rounded (-ffp-contract=off), so
// all machines compute the same bits.
#include "pack/dequant.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <future>
#include <limits>
#include <vector>

namespace headrace {
namespace {

constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t kNf4Values[16] = {-123, -86, -65, -49, -35, -23, -11, 0, 10, 20, 30, 42, 54, 69, 89, 123};
constexpr int8_t kFp4Values[16] = {0, 1, 64, 96, 32, 48, 16, 24, 0, -1, -64, -96, -32, -48, -16, -24};
constexpr size_t kMinBlocksPerThread = 1024;

uint16_t load_u16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

uint32_t load_u32(const uint8_t* p) { return load_u16(p) | static_cast<uint32_t>(load_u16(p + 2)) << 16; }

float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = half >> 10 & 31;
    const uint32_t fraction = half & 0x3ff;
    if (exponent == 0) {  // zero and subnormals: fraction * 2^-24, exact
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
    }
    const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
    return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

float load_half(const uint8_t* p) { return half_to_float(load_u16(p)); }

void decode_f32(const uint8_t* src, float* dst, size_t n) { std::memcpy(dst, src, n * 4); }

void decode_f16(const uint8_t* src, float* dst, size_t n) {
    for (size_t i = 0; i < n; ++i) dst[i] = load_half(src + 2 * i);
}

void decode_bf16(const uint8_t* src, float* dst, size_t n) {
    for (size_t i = 0; i < n; ++i) dst[i] = std::bit_cast<float>(static_cast<uint32_t>(load_u16(src + 2 * i)) << 16);
}

// 32 elements in 16 bytes: the low nibbles are the first half, the high nibbles the second.

void decode_q4_0(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 18, dst += 32) {
        const float d = load_half(src);
        for (int i = 0; i < 16; ++i) {
            dst[i] = d * static_cast<float>((src[2 + i] & 15) - 8);
            dst[16 + i] = d * static_cast<float>((src[2 + i] >> 4) - 8);
        }
    }
}

void decode_q4_1(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 20, dst += 32) {
        const float d = load_half(src), m = load_half(src + 2);
        for (int i = 0; i < 16; ++i) {
            dst[i] = d * static_cast<float>(src[4 + i] & 15) + m;
            dst[16 + i] = d * static_cast<float>(src[4 + i] >> 4) + m;
        }
    }
}

// The fifth bit of element i is bit i of a 32-bit word.

void decode_q5_0(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 22, dst += 32) {
        const float d = load_half(src);
        const uint32_t high = load_u32(src + 2);
        for (int i = 0; i < 16; ++i) {
            const uint32_t a = (src[6 + i] & 15u) | (high >> i & 1) << 4;
            const uint32_t b = static_cast<uint32_t>(src[6 + i] >> 4) | (high >> (16 + i) & 1) << 4;
            dst[i] = d * static_cast<float>(static_cast<int>(a) - 16);
            dst[16 + i] = d * static_cast<float>(static_cast<int>(b) - 16);
        }
    }
}

void decode_q5_1(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 24, dst += 32) {
        const float d = load_half(src), m = load_half(src + 2);
        const uint32_t high = load_u32(src + 4);
        for (int i = 0; i < 16; ++i) {
            const uint32_t a = (src[8 + i] & 15u) | (high >> i & 1) << 4;
            const uint32_t b = static_cast<uint32_t>(src[8 + i] >> 4) | (high >> (16 + i) & 1) << 4;
            dst[i] = d * static_cast<float>(static_cast<int>(a)) + m;
            dst[16 + i] = d * static_cast<float>(static_cast<int>(b)) + m;
        }
    }
}

void decode_q8_0(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 34, dst += 32) {
        const float d = load_half(src);
        for (int i = 0; i < 32; ++i) dst[i] = d * static_cast<float>(static_cast<int8_t>(src[2 + i]));
    }
}

// K formats: 256 elements with a scale (and a minimum) per 16 or 32. These are integers times a half-precision factor.

void decode_q2_k(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 84, dst += 256) {
        const uint8_t *scales = src, *low = src + 16;
        const float d = load_half(src + 80), dmin = load_half(src + 82);
        for (int group = 0; group < 16; ++group) {  // 16 elements each
            const int half = group / 8, shift = group / 2 % 4 * 2;
            const float scale = d * static_cast<float>(scales[group] & 15);
            const float minimum = dmin * static_cast<float>(scales[group] >> 4);
            const uint8_t* q = low + 32 * half + group % 2 * 16;
            for (int i = 0; i < 16; ++i) dst[16 * group + i] = scale * static_cast<float>(q[i] >> shift & 3) - minimum;
        }
    }
}

void decode_q3_k(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 110, dst += 256) {
        const uint8_t *high = src, *low = src + 32, *scales = src + 96;
        const float d = load_half(src + 108);
        for (int group = 0; group < 16; ++group) {
            const int nibble = group < 8 ? scales[group] & 15 : scales[group - 8] >> 4;
            const int top = scales[8 + group % 4] >> group / 4 * 2 & 3;
            const float scale = d * static_cast<float>((nibble | top << 4) - 32);
            const int half = group / 8, shift = group / 2 % 4 * 2, bit = group / 2, at = group % 2 * 16;
            for (int i = 0; i < 16; ++i) {
                const int q = (low[32 * half + at + i] >> shift & 3) | (high[at + i] >> bit & 1) << 2;
                dst[16 * group + i] = scale * static_cast<float>(q - 4);
            }
        }
    }
}

struct ScaleMin {
    float scale, minimum;
};

// Scale and minimum of group 0..7, 6 bits each, from the 12 bytes that Q4_K and Q5_K have in common.
ScaleMin scale_min(const uint8_t* scales, int group, float d, float dmin) {
    int scale, minimum;
    if (group < 4) {
        scale = scales[group] & 63;
        minimum = scales[group + 4] & 63;
    } else {
        scale = (scales[group + 4] & 15) | scales[group - 4] >> 6 << 4;
        minimum = scales[group + 4] >> 4 | scales[group] >> 6 << 4;
    }
    return {d * static_cast<float>(scale), dmin * static_cast<float>(minimum)};
}

void decode_q4_k(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 144, dst += 256) {
        const float d = load_half(src), dmin = load_half(src + 2);
        for (int group = 0; group < 8; ++group) {  // 32 elements each
            const auto [scale, minimum] = scale_min(src + 4, group, d, dmin);
            const uint8_t* q = src + 16 + group / 2 * 32;
            const int shift = group % 2 * 4;
            for (int i = 0; i < 32; ++i) dst[32 * group + i] = scale * static_cast<float>(q[i] >> shift & 15) - minimum;
        }
    }
}

void decode_q5_k(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 176, dst += 256) {
        const float d = load_half(src), dmin = load_half(src + 2);
        const uint8_t* high = src + 16;
        for (int group = 0; group < 8; ++group) {
            const auto [scale, minimum] = scale_min(src + 4, group, d, dmin);
            const uint8_t* q = src + 48 + group / 2 * 32;
            const int shift = group % 2 * 4;
            for (int i = 0; i < 32; ++i) {
                const int value = (q[i] >> shift & 15) | (high[i] >> group & 1) << 4;
                dst[32 * group + i] = scale * static_cast<float>(value) - minimum;
            }
        }
    }
}

void decode_q6_k(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 210, dst += 256) {
        const float d = load_half(src + 208);
        for (int group = 0; group < 16; ++group) {
            const int half = group / 8, quarter = group / 2 % 4, at = group % 2 * 16;
            const uint8_t* low = src + 64 * half + quarter % 2 * 32 + at;
            const uint8_t* high = src + 128 + 32 * half + at;
            const float scale = d * static_cast<float>(static_cast<int8_t>(src[192 + group]));
            for (int i = 0; i < 16; ++i) {
                const int q = (low[i] >> quarter / 2 * 4 & 15) | (high[i] >> quarter * 2 & 3) << 4;
                dst[16 * group + i] = scale * static_cast<float>(q - 32);
            }
        }
    }
}

void decode_table(const int8_t* values, const uint8_t* q, float scale, float* dst) {
    for (int i = 0; i < 16; ++i) {
        dst[i] = scale * static_cast<float>(values[q[i] & 15]);
        dst[16 + i] = scale * static_cast<float>(values[q[i] >> 4]);
    }
}

template <const int8_t* values>
void decode_half_table(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 18, dst += 32) decode_table(values, src + 2, load_half(src), dst);
}

// Writes 32 elements from 16 kept integers. `indices` has the 2-bit column indices of two kept integers per quad. A
// quad whose indices do not ascend becomes NaN.
void spread(const int* kept, const uint8_t* indices, float d, float* dst) {
    for (int quad = 0; quad < 8; ++quad, dst += 4) {
        const int two = indices[quad / 2] >> quad % 2 * 4 & 15, first = two & 3, second = two >> 2;
        const float scale = first < second ? d : std::numeric_limits<float>::quiet_NaN();
        for (int i = 0; i < 4; ++i) dst[i] = scale * 0.0f;
        dst[first] = scale * static_cast<float>(kept[2 * quad]);
        dst[second] = scale * static_cast<float>(kept[2 * quad + 1]);
    }
}

void decode_s4(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 14, dst += 32) {
        int kept[16];
        for (int i = 0; i < 8; ++i) {
            kept[i] = (src[6 + i] & 15) - 8;
            kept[8 + i] = (src[6 + i] >> 4) - 8;
        }
        spread(kept, src + 2, load_half(src), dst);
    }
}

void decode_s8(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 22, dst += 32) {
        int kept[16];
        for (int i = 0; i < 16; ++i) kept[i] = static_cast<int8_t>(src[6 + i]);
        spread(kept, src + 2, load_half(src), dst);
    }
}

// Block: a half d, a zero point 0 to 16 (a larger one gives NaN), and `groups` times 32 nibbles.
template <int groups>
void decode_g4(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 3 + 16 * groups) {
        const int zero = src[2];
        const float d = zero > 16 ? std::numeric_limits<float>::quiet_NaN() : load_half(src);
        for (int g = 0; g < groups; ++g, dst += 32) {
            for (int i = 0; i < 16; ++i) {
                const int both = src[3 + 16 * g + i];
                dst[i] = d * static_cast<float>((both & 15) - zero);
                dst[16 + i] = d * static_cast<float>((both >> 4) - zero);
            }
        }
    }
}

// Block: a half d, a zero point, and `groups` times 32 bytes.
template <int groups>
void decode_g8(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 3 + 32 * groups, dst += 32 * groups) {
        const float d = load_half(src);
        for (int i = 0; i < 32 * groups; ++i) dst[i] = d * static_cast<float>(src[3 + i] - src[2]);
    }
}

// 2^(e - 128) as a float32; e = 0 and 1 are subnormal.
float power_of_two(uint32_t e) { return std::bit_cast<float>(e < 2 ? 0x200000u << e : (e - 1) << 23); }

void decode_mxfp4(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 17, dst += 32) decode_table(kMxfp4Values, src + 1, power_of_two(src[0]), dst);
}

void decode_iq4_xs(const uint8_t* src, float* dst, size_t n) {
    for (; n--; src += 136, dst += 256) {
        const float d = load_half(src);
        const int high = load_u16(src + 2);
        for (int group = 0; group < 8; ++group) {
            const int scale = (src[4 + group / 2] >> group % 2 * 4 & 15) | (high >> 2 * group & 3) << 4;
            decode_table(kIq4Values, src + 8 + 16 * group, d * static_cast<float>(scale - 32), dst + 32 * group);
        }
    }
}

constexpr Format kFormats[] = {
    {"F32", 1, 4, decode_f32},
    {"F16", 1, 2, decode_f16},
    {"BF16", 1, 2, decode_bf16},
    {"Q4_0", 32, 18, decode_q4_0},
    {"Q4_1", 32, 20, decode_q4_1},
    {"Q5_0", 32, 22, decode_q5_0},
    {"Q5_1", 32, 24, decode_q5_1},
    {"Q8_0", 32, 34, decode_q8_0},
    {"Q2_K", 256, 84, decode_q2_k},
    {"Q3_K", 256, 110, decode_q3_k},
    {"Q4_K", 256, 144, decode_q4_k},
    {"Q5_K", 256, 176, decode_q5_k},
    {"Q6_K", 256, 210, decode_q6_k},
    {"IQ4_NL", 32, 18, decode_half_table<kIq4Values>},
    {"IQ4_XS", 256, 136, decode_iq4_xs},
    {"MXFP4", 32, 17, decode_mxfp4},
    {"NF4", 32, 18, decode_half_table<kNf4Values>},
    {"FP4", 32, 18, decode_half_table<kFp4Values>},
    {"S4", 32, 14, decode_s4},
    {"S8", 32, 22, decode_s8},
    {"G4_32", 32, 19, decode_g4<1>},
    {"G4_128", 128, 67, decode_g4<4>},
    {"G8_32", 32, 35, decode_g8<1>},
    {"G8_128", 128, 131, decode_g8<4>},
    {"C8", 32, 34, decode_q8_0},
};

}  // namespace

const Format* find_format(std::string_view name) {
    const auto* found = std::find_if(std::begin(kFormats), std::end(kFormats),
                                     [name](const Format& format) { return format.name == name; });
    return found == std::end(kFormats) ? nullptr : found;
}

void dequantize(const Format& format, const uint8_t* src, float* dst, size_t blocks, int threads) {
    const size_t most = std::max<size_t>(1, blocks / kMinBlocksPerThread);
    const size_t parts = std::min(static_cast<size_t>(std::max(threads, 1)), most);
    const auto part = [&](size_t i) {
        const size_t begin = blocks * i / parts, end = blocks * (i + 1) / parts;
        format.decode(src + begin * format.block_bytes, dst + begin * format.block, end - begin);
    };
    std::vector<std::future<void>> others;  // the destructors wait, also if one cannot start
    for (size_t i = 1; i < parts; ++i) others.push_back(std::async(std::launch::async, part, i));
    part(0);
}

}  // namespace headrace
