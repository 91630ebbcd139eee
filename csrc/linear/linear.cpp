#include "linear/linear.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace headrace {
namespace {

void check_unit(int unit) {
    if (unit < 0 || unit % 64 != 0)
        throw std::invalid_argument("a segment unit is a multiple of 64 columns, not " + std::to_string(unit));
}

// Segment i ends before unit floor((i + 1) * units / 8).
Segments segments_of(int k, int unit) {
    const int tiles = tiles_of(k);
    if (unit == 0) return {1, 0, {tiles}};
    Segments segments{kSegments, 0, {}};
    const int units = (k + unit - 1) / unit;
    for (int i = 0; i < kSegments; ++i) segments.end[i] = std::min(tiles, (i + 1) * units / kSegments * (unit / 64));
    return segments;
}

// Segments of one rank, counted from tile 0 of the whole layer.
Segments segments_of_rank(int columns, int unit, int rank, int world) {
    if (world < 1 || kSegments % world != 0 || rank < 0 || rank >= world)
        throw std::invalid_argument("a layer is cut for 1, 2, 4 or 8 ranks, and a rank is one of them");
    const Segments whole = segments_of(columns, unit);
    if (world == 1) return whole;
    if (unit == 0 || (columns + unit - 1) / unit < world)
        throw std::invalid_argument("a layer of " + std::to_string(columns) + " columns cannot be cut for " +
                                    std::to_string(world) + " ranks");
    Segments mine{kSegments / world, rank == 0 ? 0 : whole.end[rank * kSegments / world - 1], {}};
    std::copy_n(whole.end + rank * mine.count, mine.count, mine.end);
    return mine;
}

// Items of a layer. The rows are cut into stretches; the items of a stretch are the units of all parts.
struct WorkSplit {
    int unit_blocks;
    bool panels;
    int units;
    int rows;  // per stretch
    int items;

    WorkSplit(const LinearWork& work) {
        const EpilogueKind kind = work.epilogue.kind;
        const int direct = work.direct_rows ? work.direct_rows : direct_rows_of(*work.linear, *work.kernels);
        panels = work.rows > direct;
        const bool pairs = panels || (work.rows > 1 && by_row(work.linear->parts().front().kind, work.a8));
        unit_blocks = kind == EpilogueKind::kLogits ? 4 : kind == EpilogueKind::kGated || pairs ? 2 : 1;
        units = 0;
        for (int p = 0; p < parts(work); ++p) units += units_of(work, p);
        if (!work.units.empty()) units = static_cast<int>(work.units.size());
        // Few units and many rows: use shorter stretches for enough items, although each stretch unpacks its panels.
        const int wanted = work.threads > 1 ? (4 * work.threads + units - 1) / units : 1;
        const int needed = (work.rows + kStretchRows - 1) / kStretchRows, possible = std::max(1, work.rows / 48);
        const int stretches = std::max(panels ? std::min(wanted, possible) : 1, needed);
        rows = (work.rows + stretches - 1) / stretches;
        items = units * ((work.rows + rows - 1) / rows);
    }

    static int parts(const LinearWork& work) {
        return work.linear->gated() ? 1 : static_cast<int>(work.linear->parts().size());
    }

    int units_of(const LinearWork& work, int part) const {
        return (work.linear->parts()[part].row_blocks() + unit_blocks - 1) / unit_blocks;
    }
};

// Runs units [first, last) for rows [row0, row1), part by part.
void run_units(const LinearWork& work, const WorkSplit& split, int first, int last, int row0, int row1, void* scratch) {
    const PackedLinear& linear = *work.linear;
    LinearTask task{nullptr,
                    linear.gated() ? &linear.parts()[1] : nullptr,
                    &linear.segments(),
                    work.a8,
                    work.bf16,
                    work.epilogue,
                    split.unit_blocks,
                    split.panels,
                    scratch,
                    work.fetch};
    if (!work.units.empty()) {  // one call for consecutive units
        task.weight = &linear.parts()[0];
        for (int i = first, end; i < last; i = end) {
            const int unit = work.units[static_cast<size_t>(i)];
            for (end = i + 1; end < last && work.units[static_cast<size_t>(end)] == unit + end - i;) ++end;
            const int at = unit - work.first_unit;
            work.kernels->linear->run(task, at, at + end - i, row0, row1);
        }
        return;
    }
    int start = 0;  // the part's first unit
    for (int p = 0; p < WorkSplit::parts(work); ++p) {
        task.weight = &linear.parts()[p];
        const int end = start + split.units_of(work, p), from = std::max(first, start), to = std::min(last, end);
        if (from < to) work.kernels->linear->run(task, from - start, to - start, row0, row1);
        start = end;
        if (task.epilogue.out && !linear.gated()) task.epilogue.out += task.weight->n;
    }
}

// Runs items [first, last), stretch by stretch.
void run_items(const LinearWork& work, const WorkSplit& split, int first, int last, void* scratch) {
    for (int item = first; item < last;) {
        const int stretch = item / split.units, start = stretch * split.units,
                  end = std::min(last, start + split.units);
        const int row0 = stretch * split.rows, row1 = std::min(row0 + split.rows, work.rows);
        run_units(work, split, item - start, end - start, row0, row1, scratch);
        item = end;
    }
}

}  // namespace

Columns columns_of_rank(int columns, int segment_unit, int rank, int world) {
    check_unit(segment_unit);
    const Segments mine = segments_of_rank(columns, segment_unit, rank, world);
    return {mine.begin * 64, std::min(columns, mine.end[mine.count - 1] * 64)};
}

PackedLinear::PackedLinear(std::vector<PackedTensor> parts, bool gated, int segment_unit, const PackedShare& share)
    : parts_(std::move(parts)), gated_(gated) {
    if (parts_.empty()) throw std::invalid_argument("a linear layer has at least one tensor");
    for (const PackedTensor& part : parts_) {
        if (part.k != k()) throw std::invalid_argument("the tensors of a linear layer must have the same input size");
        if ((part.kind == PackedKind::kBf16) != bf16()) {
            throw std::invalid_argument(
                "bfloat16 and integer tensors cannot share a linear layer: their inputs differ");
        }
        n_ += part.n;
    }
    if (gated) {
        if (parts_.size() != 2 || parts_[0].n != parts_[1].n) {
            throw std::invalid_argument("a gated layer has a gate and an up tensor of the same size");
        }
        n_ = parts_[0].n;
    }
    const int columns = share.world > 1 ? share.columns : k();
    const Columns mine = columns_of_rank(columns, segment_unit, share.rank, share.world);
    const int block = 64 * layout_of(parts_.front().kind).tiles();
    if (share.start < 0 || share.start % block != 0 || share.start > mine.begin || share.start + k() < mine.end ||
        (share.world == 1 && share.start > 0)) {
        throw std::invalid_argument("columns " + std::to_string(share.start) + " to " +
                                    std::to_string(share.start + k()) + " do not hold the rank's " +
                                    std::to_string(mine.begin) + " to " + std::to_string(mine.end));
    }
    inputs_ = mine.end - mine.begin;
    segments_ = segments_of_rank(columns, segment_unit, share.rank, share.world);
    segments_.begin -= share.start / 64;
    for (int i = 0; i < segments_.count; ++i) segments_.end[i] -= share.start / 64;
}

int direct_rows_of(const PackedLinear& linear, const Kernels& kernels) {
    return linear.direct_rows ? linear.direct_rows : kernels.linear->direct_rows;
}

void run_linear(const LinearWork& work, int thread, std::atomic<int>& next, void* scratch) {
    const WorkSplit split(work);
    const int share = work.threads == 1 ? split.items : split.items * 4 / 5 / work.threads;
    run_items(work, split, thread * share, (thread + 1) * share, scratch);
    const int dealt = share * work.threads;
    const int turn = std::max(1, (split.items - dealt) / (8 * work.threads));
    for (;;) {
        const int first = dealt + next.fetch_add(turn, std::memory_order_relaxed);
        if (first >= split.items) return;
        run_items(work, split, first, std::min(first + turn, split.items), scratch);
    }
}

int linear_items(const LinearWork& work) { return WorkSplit(work).items; }

int linear_grain(const LinearWork& work) {
    constexpr double kBytes = 30e3, kProducts = 300e3;  // per microsecond: bytes of weights read, multiplications
    const PackedLinear& linear = *work.linear;
    const WorkSplit split(work);
    double bytes = 0;
    for (const PackedTensor& part : linear.parts())
        bytes += static_cast<double>(row_block_bytes(part.kind, part.k)) * part.row_blocks();
    const double products = static_cast<double>(linear.n()) * linear.k() * (linear.gated() ? 2 : 1) * work.rows;
    const double microseconds = std::max(bytes / kBytes, products / kProducts);
    return std::max(1, static_cast<int>(split.items / std::max(1.0, microseconds)));
}

void run_linear_items(const LinearWork& work, int first, int last, void* scratch) {
    run_items(work, WorkSplit(work), first, last, scratch);
}

}  // namespace headrace
