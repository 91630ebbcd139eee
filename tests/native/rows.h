// Random rows of every kind of weights, and memory of exact sizes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#include "linear/quantize_act_kernels.h"
#include "pack/pack.h"

namespace headrace::test {

// Memory of exactly the given size, aligned like a program's buffers.
template <class T>
class Exact {
public:
    explicit Exact(size_t count) : data_(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64))) {}
    ~Exact() { std::free(data_); }
    Exact(const Exact&) = delete;
    Exact& operator=(const Exact&) = delete;
    T* data() const { return data_; }

private:
    T* const data_;
};

struct Case {
    SourceKind kind;
    int n, k;
    Rounding rounding = Rounding::kGroup;  // of the inputs
};

// Random rows of a kind with finite scales: no half or float has an exponent above 1.
inline std::vector<uint8_t> some_rows(const Case& which, std::mt19937& rng) {
    std::vector<uint8_t> rows(static_cast<size_t>(which.n) *
                              static_cast<size_t>(source_row_bytes(which.kind, which.k)));
    for (uint8_t& byte : rows) byte = static_cast<uint8_t>(rng() & 0x3b);
    if (which.kind == static_cast<SourceKind>(PackedKind::kMxfp4)) {
        for (size_t at = 0; at < rows.size(); at += 17) rows[at] |= 0x68;  // so that a half can represent 2^(e - 128)
    }
    const size_t block = which.kind == static_cast<SourceKind>(PackedKind::kG4_32)    ? 19
                         : which.kind == static_cast<SourceKind>(PackedKind::kG4_128) ? 67
                                                                                      : 0;
    for (size_t at = 2; block && at < rows.size(); at += block)
        rows[at] = static_cast<uint8_t>(rng() % 17);               // zero points
    if (which.kind == static_cast<SourceKind>(PackedKind::kC8)) {  // one scale a row
        const size_t bytes = static_cast<size_t>(source_row_bytes(which.kind, which.k));
        for (size_t at = 0; at < rows.size(); at += 34) std::copy_n(&rows[at / bytes * bytes], 2, &rows[at]);
    }
    const size_t kept = which.kind == static_cast<SourceKind>(PackedKind::kS4)   ? 8
                        : which.kind == static_cast<SourceKind>(PackedKind::kS8) ? 16
                                                                                 : 0;
    for (size_t at = 2; kept && at < rows.size(); at += 6 + kept) {  // 2-bit indices ascend
        constexpr uint8_t kTwo[6] = {4, 8, 12, 9, 13, 14};
        for (size_t i = 0; i < 4; ++i) rows[at + i] = static_cast<uint8_t>(kTwo[rng() % 6] | kTwo[rng() % 6] << 4);
    }
    return rows;
}

}  // namespace headrace::test
