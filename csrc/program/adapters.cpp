// Adapters (LoRA): the low-rank products of rows that have one.
#include <algorithm>

#include "low_rank/kernels.h"
#include "program/phases.h"
#include "system/kernels.h"

namespace headrace {
namespace {

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
    const LowRankKernels& kernels = *w.run.kernels.low_rank;
    const int rows = w.run.rows.adapters.empty() ? 0 : w.rows;
    const int groups = (w.buffer(phase.low).width() + kRanks - 1) / kRanks;
    w.share(rows * groups, [&](int first, int last) {
        for (int item = first; item < last; ++item) {
            const int row = item / groups, start = item % groups * kRanks;
            const LowRank* adapter = adapter_of(phase, w, row);
            if (!adapter || start >= adapter->rank) continue;
            const float* x = w.floats(phase.in) + row * w.stride(phase.in);
            float* low = w.floats({phase.low, 0}) + row * w.stride({phase.low, 0}) + start;
            const uint16_t* down = adapter->down.data() + int64_t{start} * phase.in_width;
            kernels.down(low, down, x, phase.in_width, std::min(kRanks, adapter->rank - start));
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
            kernels.up(out, adapter->up.data() + start, phase.out_width, low, adapter->rank, columns);
        }
    });
}

}  // namespace headrace
