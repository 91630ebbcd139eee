// Runs a unit of a linear layer with panels, then its epilogue.
#pragma once

#include "linear/columns.inl"
#include "linear/epilogue.inl"
#include "linear/panel.inl"

namespace headrace::HEADRACE_ISA {

// Contents of LinearTask::scratch.
template <class Products>
struct PanelScratch {
    static constexpr int kFloats = (kStretchRows + Products::kMost - 1) / Products::kMost * kStepFloats<Products>;
    Panel panel;
    alignas(64) float sums[2][kFloats];
    alignas(64) float levels[kSegmentLevels * kFloats];
    static_assert(Products::kMost <= kEpilogueRows, "the epilogue takes a step's rows at once");
};

// Prefetches the outputs that kAdd reads: another core may have written them.
HEADRACE_INLINE void fetch_sums(const LinearTask& task, int block, int row, int rows) {
    const float* out = task.epilogue.out + row * task.epilogue.stride + block * 16;
    for (int m = 0; m < rows; ++m) prefetch(out + m * task.epilogue.stride);
}

// Runs one panel: two row blocks of the weight; gated: panel 0 is the gate and panel 1 is up.
template <class Products, class Done>
static void run_panel(Products& products, const LinearTask& task, int unit, int index, int row0, int row1, bool keeps,
                      const Done& done) {
    static_assert(sizeof(PanelScratch<Products>) <= kLinearScratchBytes, "the scratch must hold a panel and the sums");
    PanelScratch<Products>& scratch = *(PanelScratch<Products>*)task.scratch;
    const bool gated = task.epilogue.kind == EpilogueKind::kGated;
    const PackedTensor& weight = gated && index == 1 ? *task.up : *task.weight;
    const int first = unit * task.unit_blocks + (gated ? 0 : 2 * index), last = weight.row_blocks() - 1;
    const int block[2] = {first, first < last ? first + 1 : first};  // a single block: its second result is ignored
    const uint8_t* next[2] = {nullptr, nullptr};
    for (int c = 0; c < 2; ++c) {
        if (gated && index == 0) {
            next[c] = task.up->data + block[c] * task.up->stride;
        } else if (first + 2 + c <= last) {
            next[c] = task.weight->data + (first + 2 + c) * task.weight->stride;
        }
    }
    multiply_panel(products, task, weight, block, next, row0, row1, scratch.panel, scratch.sums[index], scratch.levels,
                   keeps, done);
}

// The last panel of a unit finishes the rows of each step as soon as their sums are complete: they are still in L1, and
// the stores overlap with the next step's products.
template <class Products>
static void run_panels(Products& products, const LinearTask& task, int unit, int row0, int row1) {
    constexpr int most = Products::kMost;
    const bool gated = task.epilogue.kind == EpilogueKind::kGated;
    const int blocks = blocks_of_unit(task, unit), first = unit * task.unit_blocks;
    const int panels = gated ? 2 : (blocks + 1) / 2;
    if (panels == 2) run_panel(products, task, unit, 0, row0, row1, true, [](int, int, float*) {});
    float* before = ((PanelScratch<Products>*)task.scratch)->sums[0];  // of panel 0, step by step
    run_panel(products, task, unit, panels - 1, row0, row1, false, [&](int row, int rows, float* y) {
        if (task.epilogue.kind == EpilogueKind::kAdd && row + 3 * most <= row1) {
            for (int b = 0; b < blocks; ++b) fetch_sums(task, first + b, row + 2 * most, most);
        }
        alignas(64) float joined[4 * 16 * most];
        float *sums = panels == 2 ? before : y, *up = y;
        before += kStepFloats<Products>;
        if (panels == 2 && !gated) {  // logits: four blocks
            __builtin_memcpy(joined, sums, sizeof(float) * 32 * rows);
            __builtin_memcpy(joined + 32 * rows, y, sizeof(float) * 32 * rows);
            sums = joined;
        }
        add_outliers(task, *task.weight, first, blocks, row, rows, sums);
        if (gated) add_outliers(task, *task.up, first, blocks, row, rows, up);
        finish(task, unit, blocks, row, rows, sums, up);
    });
}

}  // namespace headrace::HEADRACE_ISA
