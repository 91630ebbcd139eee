// Adapters (LoRA): the low-rank products of rows that have one.
#include <algorithm>
#include <bit>

#include "program/phases.h"

namespace headrace {
namespace {

float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Sixteen partial sums, so that the order of additions is that of no instruction set.
float dot(const uint16_t* a, const float* x, int n) {
    constexpr int kSums = 16;
    float sums[kSums] = {};
    int i = 0;
    for (; i + kSums <= n; i += kSums) {
        for (int j = 0; j < kSums; ++j) sums[j] += from_bf16(a[i + j]) * x[i + j];
    }
    for (int j = 0; i + j < n; ++j) sums[j] += from_bf16(a[i + j]) * x[i + j];
    for (int half = kSums / 2; half; half /= 2) {
        for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
    }
    return sums[0];
}

// The adapter of a row for this layer; null if it has none.
const LowRank* adapter_of(const AdapterPhase& phase, const Worker& w, int row) {
    const int number = w.run.rows.adapters[static_cast<size_t>(row)];
    if (number <= 0 || static_cast<size_t>(number) > phase.adapters.size()) return nullptr;
    const LowRank& adapter = phase.adapters[static_cast<size_t>(number) - 1];
    return adapter.rank ? &adapter : nullptr;
}

}  // namespace

void run_adapters(const AdapterPhase& phase, Worker& w) {
    constexpr int kRanks = 4, kColumns = 512;
    const int rows = w.run.rows.adapters.empty() ? 0 : w.rows;
    const int groups = (w.buffer(phase.low).width() + kRanks - 1) / kRanks;
    w.share(rows * groups, [&](int first, int last) {
        for (int item = first; item < last; ++item) {
            const int row = item / groups, start = item % groups * kRanks;
            const LowRank* adapter = adapter_of(phase, w, row);
            if (!adapter) continue;
            const float* x = w.floats(phase.in) + row * w.stride(phase.in);
            float* low = w.floats({phase.low, 0}) + row * w.stride({phase.low, 0});
            for (int k = start; k < std::min(start + kRanks, adapter->rank); ++k)
                low[k] = dot(adapter->down.data() + int64_t{k} * phase.in_width, x, phase.in_width);
        }
    });
    const int pieces = (phase.out_width + kColumns - 1) / kColumns;
    w.share(rows * pieces, [&](int first, int last) {
        for (int item = first; item < last; ++item) {
            const int row = item / pieces, start = item % pieces * kColumns;
            const LowRank* adapter = adapter_of(phase, w, row);
            if (!adapter) continue;
            const int columns = std::min(kColumns, phase.out_width - start);
            const float* low = w.floats({phase.low, 0}) + row * w.stride({phase.low, 0});
            float* out = w.floats(phase.out) + row * w.stride(phase.out) + start;
            for (int k = 0; k < adapter->rank; ++k) {
                const uint16_t* up = adapter->up.data() + int64_t{k} * phase.out_width + start;
                for (int i = 0; i < columns; ++i) out[i] += low[k] * from_bf16(up[i]);
            }
        }
    });
}

}  // namespace headrace
