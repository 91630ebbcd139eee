// Linear layers of one instruction set: cutting the work into blocks, panels for many rows, epilogues.
#include "vec/vec.h"

#include "linear_internal.h"

namespace headrace::HEADRACE_ISA {

#include "a8.inl"
#include "activation.inl"
#include "linear_tile.inl"

#include "linear_bf16.inl"
#include "linear_epilogue.inl"
#include "linear_panel.inl"

constexpr int kMostRows = kDirectRows;            // input rows at a time
constexpr int kMostBlocks = 4;                    // row blocks of a unit
using Sums = float[kMostBlocks * kMostRows * 16];  // [block][rows][16]

// Row blocks [block, block + blocks) of one tensor, at most four, into y.
static void multiply(const LinearTask& task, const PackedTensor& weight, int block, int blocks, int row, int rows, float* y) {
    const Segments& segments = *task.segments;
    if (weight.kind == PackedKind::kBf16) {
        const uint16_t* x = task.bf16.x + (int64_t)row * task.bf16.kp;
        for (int b = 0; b < blocks; b += 2) {
            const int two = blocks - b < 2 ? blocks - b : 2;
            bf16_blocks(weight, block + b, two, segments, x, task.bf16.kp, rows, y + b * rows * 16);
        }
        return;
    }
    const DirectKernel kernel = direct_kernels[(int)weight.kind][rows - 1];
    const A8Block* x = task.a8.blocks + (int64_t)row * task.a8.tiles;
    for (int b = 0; b < blocks; ++b) {
        kernel(weight.data + (block + b) * weight.stride, segments, x, task.a8.tiles, y + b * rows * 16);
    }
}

// The row blocks of a unit that exist.
HEADRACE_INLINE int blocks_of_unit(const LinearTask& task, int unit) {
    const int left = task.weight->row_blocks() - unit * task.unit_blocks;
    return left < task.unit_blocks ? left : task.unit_blocks;
}

HEADRACE_INLINE void finish(const LinearTask& task, int unit, int blocks, int row, int rows, const float* y) {
    if (task.epilogue.kind == EpilogueKind::kGated) {
        finish_gated(task, unit, blocks, row, rows, y);
    } else if (task.epilogue.kind == EpilogueKind::kLogits) {
        finish_logits(task, unit, blocks, row, rows, y);
    } else {
        finish_store(task, unit * task.unit_blocks, blocks, row, rows, y);
    }
}

// Rows in steps of nearly equal size, none above `most`: 7 is 4 + 3, not 6 + 1.
HEADRACE_INLINE int step_rows(int left, int most) { return (left + (left + most - 1) / most - 1) / ((left + most - 1) / most); }

static void run_direct(const LinearTask& task, int unit, int row0, int row1, int most) {
    const int blocks = blocks_of_unit(task, unit), first = unit * task.unit_blocks;
    for (int row = row0, rows; row < row1; row += rows) {
        rows = step_rows(row1 - row, most);
        alignas(64) Sums y;
        multiply(task, *task.weight, first, blocks, row, rows, y);
        if (task.epilogue.kind == EpilogueKind::kGated) {
            multiply(task, *task.up, first, blocks, row, rows, y + blocks * rows * 16);
        }
        finish(task, unit, blocks, row, rows, y);
    }
}

// At most two panels: two pairs of row blocks of `weight`, or a pair of the gate and one of up.
static void run_panels(const LinearTask& task, int unit, int row0, int row1) {
    const bool gated = task.epilogue.kind == EpilogueKind::kGated;
    const int blocks = blocks_of_unit(task, unit), first = unit * task.unit_blocks, tiles = task.weight->tiles();
    const int panels = gated ? 2 : (blocks + 1) / 2;
    for (int p = 0; p < panels; ++p) {
        const PackedTensor& weight = gated && p == 1 ? *task.up : *task.weight;
        const int block = gated ? first : first + 2 * p, last = first + blocks - 1;
        const Panel panel = panel_at(task.scratch, tiles, p);
        fill_panel(weight, block, 0, panel);
        fill_panel(weight, block < last ? block + 1 : block, 1, panel);  // a lone block twice: its copy is not used
    }
    for (int row = row0, rows; row < row1; row += rows) {
        rows = step_rows(row1 - row, kPanelRows);
        alignas(64) Sums y;
        const A8Block* x = task.a8.blocks + (int64_t)row * task.a8.tiles;
        for (int p = 0; p < panels; ++p) {
            const Layout layout = layout_of(gated && p == 1 ? task.up->kind : task.weight->kind);
            // Where the gate has one block only, up's follows it at once.
            float* to = y + p * (gated ? blocks : 2) * rows * 16;
            panel_kernel(layout, rows)(panel_at(task.scratch, tiles, p), layout.zero, *task.segments, x, task.a8.tiles, to);
        }
        finish(task, unit, blocks, row, rows, y);
    }
}

static void run(const LinearTask& task, int first, int last, int row0, int row1) {
    const bool bf16 = task.weight->kind == PackedKind::kBf16;
    for (int unit = first; unit < last; ++unit) {
        if (task.panels && !bf16) {
            run_panels(task, unit, row0, row1);
        } else {
            run_direct(task, unit, row0, row1, bf16 ? kBf16Step : kDirectRows);
        }
    }
}

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {run, kDirectRows};

}  // namespace headrace::HEADRACE_ISA
