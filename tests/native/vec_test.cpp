// Tests every function of csrc/vec, for each instruction set of this CPU, against scalar code: random values and
// extremes in all lanes. Results that must be equal on all instruction sets are compared by bits.
#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <limits>

#include "check.h"
#include "system/isa.h"
#include "vec_shim.h"

using namespace headrace;
using namespace headrace::test;

namespace {

constexpr int kMany = 16 * 2048;
constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

const VecShim& shim_of(Isa isa) {
    switch (isa) {
#if defined(HEADRACE_X86)
        case Isa::kAmx:
        case Isa::kAmxAll:
        case Isa::kAvx512:
            return avx512::vec_shim;
        case Isa::kAvx512Vnni:
            return avx512vnni::vec_shim;
        case Isa::kAvxVnni:
            return avxvnni::vec_shim;
        case Isa::kAvx2:
            return avx2::vec_shim;
#elif defined(HEADRACE_ARM)
        case Isa::kI8mm:
            return i8mm::vec_shim;
        case Isa::kNeon:
            return neon::vec_shim;
#endif
        default:
            return plain::vec_shim;
    }
}

std::vector<int32_t> random_words(std::mt19937& rng, size_t count) {
    return random_ints<int32_t>(rng, count, {0, 1, -1, INT32_MAX, INT32_MIN, 1 << 24, (1 << 24) + 1, 127, -128});
}

// Floats with random bits, floats of ordinary size, and extremes.
std::vector<float> random_floats(std::mt19937& rng, size_t count = kMany) {
    const float extremes[] = {
        0.0f, -0.0f, 1.0f, -1.0f, FLT_MIN, -FLT_MIN, FLT_TRUE_MIN, -FLT_TRUE_MIN, FLT_MAX,   -FLT_MAX,
        kInf, -kInf, kNan, 0.5f,  -0.5f,   1.5f,     2.5f,         0x1p24f,       0x1p-126f, 0x1.fffffcp-127f};
    std::vector<float> values = normal_floats(rng, count, 10.0f);
    for (float& value : values) {
        const uint32_t which = rng() % 4;
        if (which == 0) value = extremes[rng() % std::size(extremes)];
        if (which == 1) value = bits_of<float>(static_cast<uint32_t>(rng()));
    }
    return values;
}

template <class F, class... In>
std::vector<float> floats(F run, const In&... in) {
    std::vector<float> out(kMany);
    run(in.data()..., kMany, out.data());
    return out;
}

// Rounds to nearest even, computed in double. NaN keeps its upper bits and becomes quiet.
uint16_t to_bf16(float x) {
    const uint32_t bits = bits_of<uint32_t>(x);
    if (std::isnan(x)) return static_cast<uint16_t>((bits | 0x400000) >> 16);
    const uint16_t down = static_cast<uint16_t>(bits >> 16), up = static_cast<uint16_t>(down + 1);
    if (!(bits & 0xffff)) return down;
    const auto value = [](uint16_t half) {
        const double wide = bits_of<float>(static_cast<uint32_t>(half) << 16);
        return std::isinf(wide) ? std::copysign(0x1p128, wide) : wide;  // for values that round to infinity
    };
    const double below = std::abs(x - value(down)), above = std::abs(value(up) - x);
    return below < above || (below == above && !(down & 1)) ? down : up;
}

double half_value(uint16_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const double sign = half & 0x8000 ? -1.0 : 1.0;
    if (exponent == 31) return fraction ? double{kNan} : sign * double{kInf};
    return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

void check_floats(const VecShim& v, std::mt19937& rng) {
    const std::vector<float> x = random_floats(rng), y = random_floats(rng), z = random_floats(rng);
    std::vector<int32_t> words(kMany);
    equal(floats(v.copy, x), [&](size_t i) { return x[i]; }, "copy");
    equal(floats(v.fma, x, y, z), [&](size_t i) { return std::fmaf(x[i], y[i], z[i]); }, "fma");
    // Values for which rounding twice changes the result: product and addend cancel or make a tie.
    std::vector<float> near = x, other = y;
    for (size_t i = 0; i < near.size(); ++i) {
        other[i] = 1.0f + std::ldexp(static_cast<float>(rng() % 8), -23);
        near[i] = -std::ldexp(static_cast<float>(rng() % 16), i % 2 ? -24 : -47) - (i % 4 < 2 ? 1.0f : 0.0f);
    }
    equal(floats(v.fma, other, other, near), [&](size_t i) { return std::fmaf(other[i], other[i], near[i]); }, "fma");
    std::vector<float> twice(near.size());  // control: rounded twice
    for (size_t i = 0; i < near.size(); ++i) {
        const volatile float product = other[i] * other[i];  // volatile, so that the compiler makes no fma
        twice[i] = product + near[i];
    }
    require(!same_bits(twice, floats(v.fma, other, other, near)), "rounding twice does not show");
    equal(floats(v.max, x, y), [&](size_t i) { return x[i] > y[i] ? x[i] : y[i]; }, "max");
    equal(floats(v.min, x, y), [&](size_t i) { return x[i] < y[i] ? x[i] : y[i]; }, "min");
    v.as_i32(x.data(), kMany, words.data());
    equal(words, [&](size_t i) { return bits_of<int32_t>(x[i]); }, "as_i32");
    std::vector<float> back(kMany);
    v.as_f32(words.data(), kMany, back.data());
    require(same_bits(back, x), "as_f32");
    for (int count = 0; count <= v.lanes; ++count) {
        std::vector<float> in(x.begin(), x.begin() + count), out(static_cast<size_t>(v.lanes), 7.0f);
        v.load_part(in.data(), count, out.data());  // memory that ends with the lanes
        equal(out, [&](size_t i) { return i < in.size() ? in[i] : 0.0f; }, "load_f32 of some");
        std::vector<float> some(static_cast<size_t>(count));
        v.store_part(x.data(), count, some.data());
        require(same_bits(some, in), "store_f32 of some");
    }
    for (const float value : {0.0f, -0.0f, kInf, -3.5f}) {
        std::vector<float> out(static_cast<size_t>(v.lanes));
        v.set_f32(value, out.data());
        equal(out, [&](size_t) { return value; }, "set_f32");
    }
}

void check_conversions(const VecShim& v, std::mt19937& rng) {
    const std::vector<int32_t> words = random_words(rng, kMany);
    std::vector<float> out(kMany);
    v.to_f32(words.data(), kMany, out.data());
    equal(out, [&](size_t i) { return static_cast<float>(words[i]); }, "to_f32");

    std::vector<float> x(kMany);  // up to 2^22: ties and their neighbours
    for (size_t i = 0; i < x.size(); ++i) {
        const float whole = static_cast<float>(below(rng, i % 2 ? 300 : 1 << 21)) + (rng() % 2 ? 0.5f : 0.0f);
        x[i] = std::nextafterf(whole, rng() % 3 == 0 ? 0.0f : rng() % 2 ? whole : kInf) * (rng() % 2 ? 1.0f : -1.0f);
    }
    std::vector<int32_t> rounded(kMany);
    v.round_i32(x.data(), kMany, rounded.data());
    equal(rounded, [&](size_t i) { return static_cast<int32_t>(std::nearbyint(double{x[i]})); }, "round_i32");

    std::vector<uint16_t> halves(65536);
    for (size_t i = 0; i < halves.size(); ++i)
        halves[i] = static_cast<uint16_t>(i * 40503);  // all halves, in all lanes
    std::vector<float> wide(halves.size());
    v.load_f16(halves.data(), 65536, wide.data());
    equal(wide, [&](size_t i) { return static_cast<float>(half_value(halves[i])); }, "load_f16");
    v.load_bf16(halves.data(), 65536, wide.data());
    for (size_t i = 0; i < wide.size(); ++i) {
        require(bits_of<uint32_t>(wide[i]) == static_cast<uint32_t>(halves[i]) << 16, "load_bf16");
    }
    std::vector<float> numbers = random_floats(rng);
    for (size_t i = 0; i < numbers.size(); i += 3) {  // ties and their neighbours
        const uint32_t tie = (static_cast<uint32_t>(rng()) & 0xffff0000) | 0x8000;
        numbers[i] = bits_of<float>(tie + static_cast<uint32_t>(below(rng, 3)) - 1);
    }
    std::vector<uint16_t> narrow(kMany);
    v.store_bf16(numbers.data(), kMany, narrow.data());
    equal(narrow, [&](size_t i) { return to_bf16(numbers[i]); }, "store_bf16");

    std::vector<uint8_t> bytes(256);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 37);
    const auto* signed_bytes = reinterpret_cast<const int8_t*>(bytes.data());
    std::vector<float> of_bytes(256);
    std::vector<int32_t> as_words(256);
    v.load_i8_f32(signed_bytes, 256, of_bytes.data());
    equal(of_bytes, [&](size_t i) { return static_cast<float>(signed_bytes[i]); }, "load_i8_f32");
    v.load_u8_f32(bytes.data(), 256, of_bytes.data());
    equal(of_bytes, [&](size_t i) { return static_cast<float>(bytes[i]); }, "load_u8_f32");
    v.load_u8_i32(bytes.data(), 256, as_words.data());
    equal(as_words, [&](size_t i) { return static_cast<int32_t>(bytes[i]); }, "load_u8_i32");
}

void check_integers(const VecShim& v, std::mt19937& rng) {
    const std::vector<int32_t> x = random_words(rng, kMany), y = random_words(rng, kMany);
    std::vector<int32_t> out(kMany);
    for (int count = 0; count < 32; ++count) {
        v.shift_left(x.data(), count, kMany, out.data());
        equal(out, [&](size_t i) { return static_cast<int32_t>(static_cast<uint32_t>(x[i]) << count); }, "shift_left");
    }
    v.max_ints(x.data(), y.data(), kMany, out.data());
    equal(out, [&](size_t i) { return std::max(x[i], y[i]); }, "max of integers");
    std::vector<int32_t> bytes(kMany);
    for (int32_t& value : bytes) value = below(rng, 3) ? below(rng, 256) - 128 : rng() % 2 ? 127 : -128;
    std::vector<int8_t> narrow(kMany);
    v.store_i8(bytes.data(), kMany, narrow.data());
    equal(narrow, [&](size_t i) { return static_cast<int8_t>(bytes[i]); }, "store_i8");
    for (size_t at = 0; at < 32 * 64; at += 32) {
        const auto lanes = x.begin() + static_cast<ptrdiff_t>(at);
        require(v.max_i32(&x[at]) == *std::max_element(lanes, lanes + v.lanes), "max_i32");
        int32_t sum = 0, sums[2] = {0, 0}, got[2];
        for (int i = 0; i < v.lanes; ++i) sum += bytes[at + static_cast<size_t>(i)] << 20;
        std::vector<int32_t> large(bytes.begin() + static_cast<ptrdiff_t>(at),
                                   bytes.begin() + static_cast<ptrdiff_t>(at) + v.lanes);
        for (int32_t& value : large) value <<= 20;
        require(v.sum_i32(large.data()) == sum, "sum_i32");
        std::vector<int32_t> one(static_cast<size_t>(v.lanes));
        v.set_i32(x[at], one.data());
        equal(one, [&](size_t) { return x[at]; }, "set_i32");
        if (!v.store_i8_sums) continue;
        std::vector<int8_t> stored(32);
        v.store_i8_sums(&bytes[at], stored.data(), got);
        equal(stored, [&](size_t i) { return static_cast<int8_t>(bytes[at + i]); }, "store_i8_sums");
        for (size_t i = 0; i < 32; ++i) sums[i / 16] += bytes[at + i];
        require(got[0] == sums[0] && got[1] == sums[1], "sums of store_i8_sums");
    }
}

void check_bytes(const VecShim& v, std::mt19937& rng) {
    for (int round = 0; round < 64; ++round) {
        const std::vector<uint8_t> x = random_ints<uint8_t>(rng, 64, {0, 1, 127, 128, 255});
        std::vector<uint8_t> out(64);
        v.copy_bytes(x.data(), out.data());
        require(same_bits(out, x), "load_u8 and store_u8");
        for (int bits = 1; bits <= 8; ++bits) {
            for (int from = 0; from + bits <= 8; ++from) {
                for (int to = 0; to + bits <= 8; ++to) {
                    v.field(bits, from, to, x.data(), out.data());
                    const int mask = (1 << bits) - 1;
                    equal(out, [&](size_t i) { return static_cast<uint8_t>((x[i] >> from & mask) << to); }, "field");
                }
            }
        }
        const std::vector<uint8_t> table = random_ints<uint8_t>(rng, 16, {0, 255});
        std::vector<uint8_t> index(64);
        for (uint8_t& each : index) each = static_cast<uint8_t>(rng() % 16 | (rng() % 4 ? 0 : 128));
        v.lookup(table.data(), index.data(), out.data());
        equal(out, [&](size_t i) { return index[i] < 16 ? table[index[i]] : 0; }, "lookup");
        const std::vector<int32_t> eight = random_words(rng, 8), places = random_words(rng, 16);
        std::vector<int32_t> picked(16);
        v.pick(eight.data(), places.data(), picked.data());
        equal(picked, [&](size_t i) { return eight[places[i] & 7]; }, "pick");
    }
    v.prefetch(nullptr);  // an invalid address has no effect
}

// The exact result of `count` products in one DotSum.
std::vector<int32_t> exact_dots(const VecShim& v, bool wide, const std::vector<int32_t>& acc,
                                const std::vector<uint8_t>& w, const std::vector<int8_t>& a) {
    std::vector<int32_t> sums = acc;
    for (size_t j = 0; j < a.size() / 4; ++j) {
        for (size_t n = 0; n < 16; ++n) {
            for (size_t i = 0; i < 4; ++i) sums[n] += (w[64 * j + 4 * n + i] - (wide ? v.wide_zero : 0)) * a[4 * j + i];
        }
    }
    return sums;
}

// Products of bytes up to `most`, with as many products as a DotSum can hold.
void check_dots_of(const VecShim& v, std::mt19937& rng, int most) {
    const bool wide = most > 127;
    const int room = v.dot_room(wide && v.wide_zero ? v.wide_zero : most), largest = std::min(room, 8);
    require(room >= 1, "a sum that holds nothing");
    for (int round = 0; round < 1000; ++round) {
        const size_t count = static_cast<size_t>(1 + round % largest);
        std::vector<uint8_t> w = random_ints<uint8_t>(rng, 64 * count, {0, 1, 127, 128, 255});
        for (uint8_t& each : w) each = static_cast<uint8_t>(each % (most + 1));
        std::vector<int8_t> a(4 * count);
        for (int8_t& each : a) each = static_cast<int8_t>(below(rng, 255) - 127);
        std::vector<int32_t> acc = random_words(rng, 16), out(16);
        for (int32_t& each : acc) each >>= 1;
        if (round %
            2) {  // extremes: the largest or the smallest bytes times 127 and -127, with all signs, in all lanes
            for (size_t i = 0; i < a.size(); ++i) a[i] = round >> (i % 4 + 1) & 1 ? 127 : -127;
            if (round % 4 == 3) std::fill(w.begin(), w.end(), static_cast<uint8_t>(round & 64 ? most : 0));
        }
        v.dot(wide, static_cast<int>(count), acc.data(), w.data(), a.data(), out.data());
        require(out == exact_dots(v, wide, acc, w, a), wide ? "dot of wide bytes" : "dot");
        if (count != 4) continue;
        v.dot_lanes(wide, acc.data(), w.data(), a.data(), out.data());
        require(out == exact_dots(v, wide, acc, w, a), "dot of lanes");
    }
    if (room >= 16) return;
    // Control: with the largest bytes, one product more than dot_room does not fit.
    const size_t count = static_cast<size_t>(room) + 1;
    const std::vector<uint8_t> w(64 * count, static_cast<uint8_t>(wide ? 0 : most));
    const std::vector<int8_t> a(4 * count, 127);
    const std::vector<int32_t> acc(16, 0);
    std::vector<int32_t> out(16);
    v.dot(wide, static_cast<int>(count), acc.data(), w.data(), a.data(), out.data());
    require(out != exact_dots(v, wide, acc, w, a), "a sum holds more than is said");
}

void check_dots(const VecShim& v, std::mt19937& rng) {
    for (const int most : {1, 3, 7, 15, 31, 63, 127, 255}) check_dots_of(v, rng, most);
    // As many products as the int8 pool sums for 512 dimensions, all of one sign; 128 times that does not overflow.
    for (const int8_t sign : {int8_t{127}, int8_t{-127}}) {
        const std::vector<uint8_t> w(64, 255);
        const std::vector<int8_t> a(4, sign);
        std::vector<int32_t> acc(16, 0);
        for (int d = 0; d < 512; d += 4) v.dot(true, 1, acc.data(), w.data(), a.data(), acc.data());
        equal(acc, [&](size_t) { return 512 * (255 - v.wide_zero) * sign; }, "dots of 512 dimensions");
        static_assert(int64_t{512} * 255 * 127 * 128 <= INT32_MAX);
    }
    // bfloat16 pairs, with values for which the sums are normal numbers.
    for (int round = 0; round < 4000; ++round) {
        std::vector<uint16_t> w(32), x(2);
        for (auto* each : {&w, &x}) {
            for (uint16_t& half : *each) half = static_cast<uint16_t>((rng() & 0x80ff) | (120 + rng() % 8) << 7);
        }
        const std::vector<float> acc = normal_floats(rng, 16, round % 2 ? 1.0f : 1e-2f);
        std::vector<float> out(16);
        const auto value = [](uint16_t half) { return bits_of<float>(static_cast<uint32_t>(half) << 16); };
        v.dot_bf16(acc.data(), w.data(), x.data(), out.data());
        const auto wanted = [&](size_t n) {
            const float odd = std::fmaf(value(w[2 * n + 1]), value(x[1]), acc[n]);
            return std::fmaf(value(w[2 * n]), value(x[0]), odd);
        };
        equal(out, wanted, "dot_bf16");
        v.add_pairs(acc.data(), w.data(), x.data(), out.data());
        for (size_t n = 0; n < 16; ++n) {
            const double pair[] = {double{value(w[2 * n])} * value(x[0]), double{value(w[2 * n + 1])} * value(x[1])};
            const double sum = acc[n] + pair[0] + pair[1],
                         size = std::abs(acc[n]) + std::abs(pair[0]) + std::abs(pair[1]);
            require(std::abs(out[n] - sum) <= size * 0x1p-22, "add_pairs");
        }
    }
}

// The largest error of `got`: relative to the exact value, absolute if that is below `tiny`.
template <class F>
double error_of(const std::vector<float>& x, const std::vector<float>& got, F right, double tiny = 1e-37) {
    double most = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        const double wanted = right(double{x[i]});
        most = std::max(most, std::abs(got[i] - wanted) / std::max(std::abs(wanted), tiny));
    }
    return most;
}

void check_maths(const VecShim& v, std::mt19937& rng) {
    const std::vector<float> any = random_floats(rng);
    std::vector<float> x(kMany);
    for (size_t i = 0; i < x.size(); ++i)
        x[i] = (static_cast<float>(rng()) * 0x1p-32f - 0.5f) * (i % 2 ? 174.0f : 4.0f);
    using Maths = decltype(VecShim::exp) VecShim::*;
    const std::pair<Maths, const char*> same_everywhere[] = {
        {&VecShim::exp, "exp"}, {&VecShim::silu, "silu"}, {&VecShim::tanh, "tanh"}, {&VecShim::gelu_tanh, "gelu_tanh"}};
    for (const auto& [run, name] : same_everywhere) {
        for (const std::vector<float>& in : {any, x}) {
            const std::vector<float> wanted = floats(plain::vec_shim.*run, in);
            equal(floats(v.*run, in), [&](size_t i) { return wanted[i]; }, name);
        }
    }
    const auto gelu = [](double y) { return y / (1 + std::exp(-1.5957691216057308 * (y + 0.044715 * y * y * y))); };
    require(error_of(x, floats(v.exp, x), [](double y) { return std::exp(y); }) < 2.5e-7, "exp");
    require(error_of(x, floats(v.silu, x), [](double y) { return y / (1 + std::exp(-y)); }) < 4e-7, "silu");
    require(error_of(x, floats(v.tanh, x), [](double y) { return std::tanh(y); }, 1.0) < 2e-7, "tanh");
    require(error_of(x, floats(v.gelu_tanh, x), gelu, 1e-3) < 2e-6, "gelu_tanh");
    for (const float bad : {kNan, -kNan}) {
        const std::vector<float> all(kMany, bad);
        equal(floats(v.silu, all), [&](size_t) { return kNan; }, "silu of NaN");
        equal(floats(v.tanh, all), [&](size_t) { return kNan; }, "tanh of NaN");
        equal(floats(v.gelu_tanh, all), [&](size_t) { return kNan; }, "gelu_tanh of NaN");
        require(std::isfinite(floats(v.exp, all)[0]), "exp of NaN is not finite");
    }
    for (const float far : {88.4f, 1e30f, kInf, -87.4f, -1e30f, -kInf}) {
        const std::vector<float> out = floats(v.exp, std::vector<float>(kMany, far));
        equal(out, [&](size_t) { return out[0]; }, "exp far away");
        require(std::isfinite(out[0]) && out[0] > 0 && (far > 0) == (out[0] > 1), "exp is held");
    }
    for (int round = 0; round < 2000; ++round) {
        const std::vector<float> lanes = normal_floats(rng, 16, round % 2 ? 1.0f : 1e6f);
        std::vector<float> sum = lanes;
        for (size_t half = 8; half > 0; half /= 2) {
            for (size_t i = 0; i < half; ++i) sum[i] += sum[i + half];
        }
        const float most = *std::max_element(lanes.begin(), lanes.end());
        require(same(v.sum_lanes(lanes.data()), sum[0]), "sum_lanes");
        require(same(v.max_lanes(lanes.data()), most) && same(v.top_lane(lanes.data()), most), "the largest lane");
        require(same(v.max_lane(lanes.data()), *std::max_element(lanes.begin(), lanes.begin() + v.lanes)), "max_lane");
    }
}

void check_softmax(const VecShim& v, std::mt19937& rng) {
    const std::vector<float> any = random_floats(rng), x = normal_floats(rng, kMany), y = normal_floats(rng, kMany),
                             z = normal_floats(rng, kMany);
    const std::vector<float> sums = floats(v.multiply_add, x, y, z);
    for (size_t i = 0; i < sums.size(); ++i) {
        volatile float product = x[i] * y[i];
        require(same(sums[i], std::fmaf(x[i], y[i], z[i])) || same(sums[i], product + z[i]), "multiply_add");
    }
    for (int round = 0; round < 2000; ++round) {
        const size_t at = static_cast<size_t>(below(rng, kMany - 16));
        const uint32_t bits = round == 0   ? 0
                              : round == 1 ? 0xffff
                                           : static_cast<uint32_t>(rng());  // the upper bits are not used
        std::vector<float> out(16);
        v.choose(bits, &any[at], &x[at], out.data());
        for (size_t i = 0; i < 16; ++i) {
            require(same_bits<float>({out[i]}, {bits >> i & 1 ? any[at + i] : x[at + i]}), "choose");
        }
    }
    std::vector<uint16_t> stored(kMany);
    std::vector<float> lanes(16), weights = x;
    for (float& weight : weights) weight = std::abs(weight);
    v.store_and_sum(weights.data(), kMany, stored.data(), lanes.data());
    equal(stored, [&](size_t i) { return to_bf16(weights[i]); }, "store_and_sum");
    double sum = 0, wanted = 0;
    for (const float lane : lanes) sum += lane;
    for (const uint16_t half : stored) wanted += bits_of<float>(static_cast<uint32_t>(half) << 16);
    require(std::abs(sum - wanted) < 1e-4 * wanted, "the sum of store_and_sum");  // summed in float, per lane

    std::vector<float> down(kMany);
    for (size_t i = 0; i < down.size(); ++i) down[i] = static_cast<float>(rng()) * -0x1p-32f * (i % 2 ? 124.0f : 3.0f);
    require(error_of(down, floats(v.exp2, down), [](double t) { return std::exp2(t); }) < 2e-7, "exp2");
    for (const auto& [in, out] : {std::pair{0.0f, 1.0f},
                                  {-0.0f, 1.0f},
                                  {-1.0f, 0.5f},
                                  {-kInf, 0.0f},
                                  {-1e30f, 0.0f},
                                  {-200.0f, 0.0f},
                                  {kNan, kNan}}) {
        const float right = out;
        equal(floats(v.exp2, std::vector<float>(kMany, in)), [&](size_t) { return right; }, "exp2");
    }
    for (const float edge : {-124.5f, -125.5f, -126.6f, -126.9f, -127.5f, -130.0f, -149.5f}) {  // subnormal or 0
        const double right = std::exp2(double{edge});
        for (const float got : floats(v.exp2, std::vector<float>(kMany, edge))) {
            require(got == 0 || std::abs(got - right) <= 1e-6 * right + 0x1p-148, "exp2 of the smallest");
        }
    }
}

void check_scan(const VecShim& v, std::mt19937& rng) {
    const std::vector<float> x = random_floats(rng), near = random_floats(rng);
    const std::vector<uint32_t> words = random_ints<uint32_t>(
        rng, kMany, {0, 1, 65535, 65536, 0x7fffffff, 0x80000000, 0x80000001, 0xffffffff, 1 << 24});
    std::vector<float> out(kMany);
    v.unsigned_f32(words.data(), kMany, out.data());
    equal(out, [&](size_t i) { return static_cast<float>(words[i]); }, "unsigned_f32");
    for (size_t at = 0; at + 32 <= kMany; at += 16) {
        std::vector<float> y(near.begin() + static_cast<ptrdiff_t>(at), near.begin() + static_cast<ptrdiff_t>(at) + 16);
        for (float& each : y) each = rng() % 4 ? each : x[at + static_cast<size_t>(&each - y.data())];
        const uint32_t *a = &words[at], *b = &words[at + 16];
        uint32_t at_least = 0, above = 0, equals = 0, under = 0;
        for (size_t i = 0; i < 16; ++i) {
            at_least |= uint32_t{x[at + i] >= y[i]} << i, above |= uint32_t{x[at + i] > y[i]} << i;
            equals |= uint32_t{x[at + i] == y[i]} << i, under |= uint32_t{a[i] < b[i]} << i;
        }
        require(v.at_least(&x[at], y.data()) == at_least, "at_least");
        require(v.above(&x[at], y.data()) == above, "above");
        require(v.equal(&x[at], y.data()) == equals, "equal");
        require(v.below(a, b) == under, "below");

        std::vector<uint32_t> least(16);
        v.min_u32(a, b, least.data());
        equal(least, [&](size_t i) { return std::min(a[i], b[i]); }, "min_u32");
        for (const int width : {1, 2}) {
            for (const bool high : {false, true}) {
                v.interleave(high, width, a, b, least.data());
                const auto wanted = [&](size_t i) {  // alternating words, `width` of each
                    const size_t w = static_cast<size_t>(width), lane = i % 4, piece = lane / w;
                    const uint32_t* from = piece % 2 ? b : a;
                    return from[i - lane + (high ? 2 : 0) + piece / 2 * w + lane % w];
                };
                equal(least, wanted, "interleave");
            }
        }
        std::vector<float> some(32, 7.0f);
        std::vector<int32_t> numbers(32, 7), chosen;
        const auto* integers = reinterpret_cast<const int32_t*>(a);
        const uint32_t bits = at == 0 ? 0xffff : at == 16 ? 0 : static_cast<uint32_t>(rng()) & 0xffff;
        for (size_t i = 0; i < 16; ++i) {
            if (bits >> i & 1) chosen.push_back(static_cast<int32_t>(i));
        }
        const int count = static_cast<int>(chosen.size());
        require(v.compress_f32(bits, &x[at], some.data()) == count, "lanes of compress_f32");
        require(v.compress_i32(bits, integers, numbers.data()) == count, "lanes of compress_i32");
        for (size_t i = 0; i < chosen.size(); ++i) {
            const size_t lane = static_cast<size_t>(chosen[i]);
            require(same_bits<float>({some[i]}, {x[at + lane]}) && numbers[i] == integers[lane], "compress");
        }
    }
    for (size_t at = 0; at + 48 <= kMany / 8; at += 16) {
        std::vector<double> doubles(16), a(16), b(16), c(16);
        v.widen(&x[at], doubles.data());
        equal(doubles, [&](size_t i) { return double{x[at + i]}; }, "widen_low and widen_high");
        for (size_t i = 0; i < 16; ++i) a[i] = x[at + i], b[i] = near[at + i], c[i] = x[at + 16 + i];
        v.max_f64(a.data(), b.data(), doubles.data());
        equal(doubles, [&](size_t i) { return a[i] > b[i] ? a[i] : b[i]; }, "max_f64");
        v.fma_f64(a.data(), b.data(), c.data(), doubles.data());
        for (size_t i = 0; i < 16; ++i) {  // may be rounded once or twice
            volatile double product = a[i] * b[i];
            require(same(doubles[i], std::fma(a[i], b[i], c[i])) || same(doubles[i], product + c[i]), "fma_f64");
        }
        const std::vector<uint64_t> long_words = random_ints<uint64_t>(rng, 32, {0, UINT32_MAX, UINT64_MAX});
        const uint64_t *first = long_words.data(), *second = first + 16;
        std::vector<uint64_t> products(16);
        std::vector<uint32_t> low(16);
        v.mul_low(first, second, products.data());
        equal(products, [&](size_t i) { return (first[i] & UINT32_MAX) * (second[i] & UINT32_MAX); }, "mul_low");
        v.even_low(first, second, low.data());
        const auto wanted = [&](size_t i) {
            const uint64_t* from = i % 2 ? second : first;
            return static_cast<uint32_t>(from[i / 2]);
        };
        equal(low, wanted, "even_low");
    }
    const size_t lanes = static_cast<size_t>(v.lanes);
    std::vector<uint32_t> word(lanes);
    std::vector<uint64_t> long_word(lanes / 2);
    std::vector<double> number(lanes / 2);
    v.set_words(0x80000001, word.data(), UINT64_MAX - 1, long_word.data(), -0.1, number.data());
    equal(word, [](size_t) { return uint32_t{0x80000001}; }, "set_u32");
    equal(long_word, [](size_t) { return UINT64_MAX - 1; }, "set_u64");
    equal(number, [](size_t) { return -0.1; }, "set_f64");
}

}  // namespace

int main() {
    for (const Isa isa : supported_isas()) {
        std::mt19937 rng(11);
        const VecShim& v = shim_of(isa);
        check_floats(v, rng);
        check_conversions(v, rng);
        check_integers(v, rng);
        check_bytes(v, rng);
        check_dots(v, rng);
        check_maths(v, rng);
        check_softmax(v, rng);
        check_scan(v, rng);
    }
    std::puts("vec: ok");
    return 0;
}
