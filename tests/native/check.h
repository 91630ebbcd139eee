// What the test programs share.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
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

}  // namespace headrace::test
