// Linear layers of packed tensors, and how the threads share one.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "linear/kernels.h"
#include "system/arena.h"
#include "system/kernels.h"

namespace headrace {

// Several packed tensors with the same input: their rows one after the other (q, k, v), or gate and up of a gated MLP.
class PackedLinear {
public:
    // `segment_unit`: columns of one unit of the fixed segments (a multiple of 64), for layers whose k tensor
    // parallelism cuts; 0: one sum. Throws std::invalid_argument for parts that do not belong together.
    PackedLinear(std::vector<PackedTensor> parts, bool gated, int segment_unit = 0);

    bool gated() const { return gated_; }
    bool bf16() const { return parts_.front().kind == PackedKind::kBf16; }
    int n() const { return n_; }  // outputs: of all parts, or of the gate
    int k() const { return parts_.front().k; }
    const std::vector<PackedTensor>& parts() const { return parts_; }
    const Segments& segments() const { return segments_; }

private:
    std::vector<PackedTensor> parts_;
    bool gated_;
    int n_ = 0;
    Segments segments_{};
};

// One layer applied to `rows` rows by `threads` threads. Plain data: a program keeps one per phase.
struct LinearWork {
    const Kernels* kernels;
    const PackedLinear* linear;
    A8 a8;          // the input, unless linear->bf16()
    Bf16Rows bf16;  // the input, if linear->bf16()
    int rows;
    int threads;
    Epilogue epilogue;
    // Rows above which panels are used: 0: as measured best (LinearKernels::direct_rows).
    int direct_rows = 0;
    FetchList* fetch = nullptr;  // of the calling thread: what to fetch besides weights
    // Of a head: the units (kVocabBlock outputs each) that are wanted, ascending. Empty: all.
    std::span<const int32_t> units{};
};

// Called by every thread with the same work, its own scratch (kLinearScratchBytes, 64-byte aligned) and the
// counter, which is 0 before and anything after. Four fifths of the work are dealt out evenly in order, the rest in
// turns, so that a thread that lost its CPU for a while does not hold up the others.
void run_linear(const LinearWork& work, int thread, std::atomic<int>& next, void* scratch);

// The same for callers that deal the work out themselves: into how many items it is cut, and items [first, last) on one
// thread. Any thread may take any item.
int linear_items(const LinearWork& work);
// How many items take about a microsecond.
int linear_grain(const LinearWork& work);
void run_linear_items(const LinearWork& work, int first, int last, void* scratch);

}  // namespace headrace
