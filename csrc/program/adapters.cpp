// Adapters (LoRA): the low-rank products of rows that have one.
#include <algorithm>

#include "low_rank/kernels.h"
#include "program/phases.h"
#include "system/kernels.h"

namespace headrace {
namespace {

// The adapter of a row for this part; null if it has none.
const LowRank* adapter_of(const AdaptedPart& part, const Worker& w, int row) {
    const int number = w.run.rows.adapters[static_cast<size_t>(row)];
    if (number <= 0 || static_cast<size_t>(number) > part.adapters.size()) return nullptr;
    const LowRank& adapter = part.adapters[static_cast<size_t>(number) - 1];
    return adapter.rank ? &adapter : nullptr;
}

int pieces(int length, int size) { return (length + size - 1) / size; }

// Divides `length` (a member of AdaptedPart) of every part into pieces of `size`, and calls
// run(part, adapter, row, start, count) for each piece of each row that has an adapter.
template <class Run>
void by_pieces(const AdapterPhase& phase, Worker& w, int AdaptedPart::* length, int size, const Run& run) {
    int each = 0;
    for (const AdaptedPart& part : phase.parts) each += pieces(part.*length, size);
    w.share((w.run.rows.adapters.empty() ? 0 : w.rows) * each, [&](int first, int last) {
        for (int item = first; item < last; ++item) {
            const int row = item / each;
            int piece = item % each;
            const AdaptedPart* part = phase.parts.data();
            for (; piece >= pieces(part->*length, size); ++part) piece -= pieces(part->*length, size);
            const LowRank* adapter = adapter_of(*part, w, row);
            const int start = piece * size;
            if (adapter) run(*part, *adapter, row, start, std::min(size, part->*length - start));
        }
    });
}

}  // namespace

void run_adapters(const AdapterPhase& phase, Worker& w) {
    constexpr int kRanks = 4, kColumns = 512;
    const LowRankKernels& kernels = *w.run.kernels.low_rank;
    const auto low_of = [&](const AdaptedPart& part, int row) {
        return w.floats({phase.low, part.low}) + row * w.stride({phase.low, 0});
    };
    const auto down = [&](const AdaptedPart& part, const LowRank& adapter, int row, int start, int count) {
        if (start >= adapter.rank) return;
        const float* x = w.floats(phase.in) + row * w.stride(phase.in);
        const uint16_t* rows = adapter.down.data() + int64_t{start} * phase.in_width;
        kernels.down(low_of(part, row) + start, rows, x, phase.in_width, std::min(count, adapter.rank - start));
    };
    const auto up = [&](const AdaptedPart& part, const LowRank& adapter, int row, int start, int count) {
        float* out = w.floats(phase.out) + row * w.stride(phase.out) + part.column + start;
        kernels.up(out, adapter.up.data() + start, part.width, low_of(part, row), adapter.rank, count);
    };
    by_pieces(phase, w, &AdaptedPart::rank, kRanks, down);
    by_pieces(phase, w, &AdaptedPart::width, kColumns, up);
}

}  // namespace headrace
