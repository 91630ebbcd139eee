// Checks for the test programs.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace headrace::test {

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "FAILED: %s\n", what);
    std::exit(1);
}

inline void require(bool ok, const char* what) {
    if (!ok) fail(what);
}

template <class F>
bool throws(F f) {
    try {
        f();
    } catch (const std::exception&) {
        return true;
    }
    return false;
}

inline int below(std::mt19937& rng, int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); }

inline std::vector<float> normal_floats(std::mt19937& rng, size_t count, float spread = 1.0f) {
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> values(count);
    for (float& value : values) value = normal(rng);
    return values;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class To, class From>
To bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &x, sizeof to);
    return to;
}

// Same bits, or both NaN.
template <class T>
bool same(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
        if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
    }
    return std::memcmp(&a, &b, sizeof a) == 0;
}

template <class T, class F>
void equal(const std::vector<T>& got, F wanted, const std::string& what) {
    for (size_t i = 0; i < got.size(); ++i) {
        const T right = wanted(i);
        if (!same(got[i], right)) {
            fail((what + " at " + std::to_string(i) + ": " + std::to_string(got[i]) + ", not " + std::to_string(right))
                     .c_str());
        }
    }
}

template <class T>
std::vector<T> random_ints(std::mt19937& rng, size_t count, const std::vector<T>& extremes) {
    std::vector<T> values(count);
    for (T& value : values) {
        const bool extreme = rng() % 4 == 0;
        value =
            extreme ? extremes[rng() % extremes.size()] : static_cast<T>(rng() ^ static_cast<uint64_t>(rng()) << 32);
    }
    return values;
}

}  // namespace headrace::test
