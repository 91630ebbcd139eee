// Linear layers of packed tensors, and the distribution of their work among threads.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "linear/kernels.h"
#include "system/arena.h"
#include "system/kernels.h"

namespace headrace {

// Columns [begin, end) that rank `rank` of `world` multiplies in a layer of `columns` columns: its part of the eight
// segments, whose units have `segment_unit` columns. Throws std::invalid_argument unless world is 1, 2, 4 or 8, rank is
// one of them, and every rank gets a unit.
struct Columns {
    int begin, end;
};
Columns columns_of_rank(int columns, int segment_unit, int rank, int world);

// The share of a rank in a layer that is cut along k. The tensors hold columns from `start` on of the layer's
// `columns`. world 1: they hold all of them.
struct PackedShare {
    int rank = 0, world = 1;
    int columns = 0, start = 0;
};

// Packed tensors with the same input: outputs one after the other (for example q, k, v), or gate and up of a gated MLP.
class PackedLinear {
public:
    // `segment_unit`: columns per unit of the fixed segments (a multiple of 64), for layers that tensor parallelism
    // cuts along k; 0: one sum. Throws std::invalid_argument if the parts do not fit together, or do not hold the
    // columns of the share.
    PackedLinear(std::vector<PackedTensor> parts, bool gated, int segment_unit = 0, const PackedShare& share = {});

    bool gated() const { return gated_; }
    bool bf16() const { return parts_.front().kind == PackedKind::kBf16; }
    int n() const { return n_; }  // outputs of all parts; gated: outputs of the gate
    int k() const { return parts_.front().k; }
    int inputs() const { return inputs_; }  // columns of the input: k, or those of the share
    const std::vector<PackedTensor>& parts() const { return parts_; }
    const Segments& segments() const { return segments_; }

    // Panels are used above this number of rows; 0: LinearKernels::direct_rows. It changes the speed, not the result.
    // Set before a program takes the layer.
    int direct_rows = 0;

private:
    std::vector<PackedTensor> parts_;
    bool gated_;
    int n_ = 0, inputs_ = 0;
    Segments segments_{};
};

// Most rows for which the layer uses the direct kernels.
int direct_rows_of(const PackedLinear& linear, const Kernels& kernels);

// One layer applied to `rows` rows by `threads` threads. Plain data: a program keeps one per phase.
struct LinearWork {
    const Kernels* kernels;
    const PackedLinear* linear;
    A8 a8;          // the input, unless linear->bf16()
    Bf16Rows bf16;  // the input, if linear->bf16()
    int rows;
    int threads;
    Epilogue epilogue;
    int direct_rows = 0;         // instead of the layer's, unless 0
    FetchList* fetch = nullptr;  // the calling thread's list, or null
    // Heads: the units (kVocabBlock outputs each) to compute, ascending. Empty: all. The first unit of the layer has
    // number first_unit.
    std::span<const int32_t> units{};
    int first_unit = 0;
};

// Every thread calls it with the same work, its own scratch (kLinearScratchBytes, 64-byte aligned) and the shared
// counter `next`, which starts at 0. Four fifths of the items are distributed evenly, the rest on demand, so that a
// descheduled thread delays the others less.
void run_linear(const LinearWork& work, int thread, std::atomic<int>& next, void* scratch);

// For callers that distribute the items themselves: the number of items. Any thread may run any item.
int linear_items(const LinearWork& work);
// Number of items that take about a microsecond.
int linear_grain(const LinearWork& work);
// Runs items [first, last) on the calling thread.
void run_linear_items(const LinearWork& work, int first, int last, void* scratch);

}  // namespace headrace
