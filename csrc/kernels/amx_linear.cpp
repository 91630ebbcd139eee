// Linear layers on AMX: bfloat16 weights, kC8 by row, and panels of all other kinds. Compiled for avx512 alone.
#include "vec/vec.h"
#if HEADRACE_IS(avx512)
#include "linear/amx.inl"
#include "linear/amx_panel.inl"
#include "linear/amx_row.inl"
#include "linear/epilogue.inl"
#include "linear/run_panels.inl"

namespace headrace::avx512 {
extern const LinearKernels linear_kernels;
}

namespace headrace::HEADRACE_ISA {

struct AmxScratch {
    alignas(64) float sums[kAmxBlocks * kStretchRows * 16];
    float levels[kSegmentLevels * kAmxBlocks * kStretchRows * 16];
};

static_assert(sizeof(AmxScratch) <= kLinearScratchBytes, "the scratch must hold the sums of all segments");

// Multiplies and finishes row blocks [block, block + blocks) of the weight, and with `unit` >= 0 this unit of gate and
// up or of logits.
static void run_amx_blocks(const LinearTask& task, int unit, int block, int blocks, int row0, int row1,
                           AmxShapes& shapes) {
    AmxScratch& scratch = *(AmxScratch*)task.scratch;
    const bool gated = task.epilogue.kind == EpilogueKind::kGated;
    const uint8_t* w[kAmxBlocks];
    for (int b = 0; b < blocks; ++b) {
        w[b] = task.weight->data + (block + b) * task.weight->stride;
        if (gated) w[blocks + b] = task.up->data + (block + b) * task.up->stride;
    }
    const int all = gated ? 2 * blocks : blocks;
    if (task.weight->kind == PackedKind::kBf16) {
        const uint16_t* x = task.bf16.x + (int64_t)row0 * task.bf16.kp;
        multiply_amx(w, all, *task.segments, x, task.bf16.kp, row1 - row0, scratch.sums, scratch.levels, shapes);
    } else {
        const A8Block* x = task.a8.blocks + (int64_t)row0 * task.a8.tiles;
        multiply_amx_rows(w, all, *task.segments, x, task.a8.tiles, row1 - row0, scratch.sums, shapes);
    }
    const float* y = scratch.sums;
    for (int row = row0, rows; row < row1; row += rows, y += all * rows * 16) {
        rows = row1 - row < kAmxRows ? row1 - row : kAmxRows;
        if (unit < 0) {
            finish_store(task, block, blocks, row, rows, y);
        } else {
            finish(task, unit, blocks, row, rows, y, y + blocks * rows * 16);
        }
    }
}

// Units [first, last) with panels.
static void run_amx_panels(const LinearTask& task, int first, int last, int row0, int row1) {
    AmxProducts products;
    for (int unit = first; unit < last; ++unit) run_panels(products, task, unit, row0, row1);
    tiles_release();
}

// `all`: also integer kinds by row and in panels; all other tasks run without AMX.
static void run_amx(const LinearTask& task, int first, int last, int row0, int row1, bool all) {
    if (task.weight->kind != PackedKind::kBf16) {
        const bool gated = task.epilogue.kind == EpilogueKind::kGated, row = by_row(task.weight->kind, task.a8);
        const bool both = !gated || by_row(task.up->kind, task.a8) == row;
        if (all && both && !row && task.panels) return run_amx_panels(task, first, last, row0, row1);
        if (!all || !both || !row) return avx512::linear_kernels.run(task, first, last, row0, row1);
    }
    AmxShapes shapes;
    if (task.epilogue.kind == EpilogueKind::kGated || task.epilogue.kind == EpilogueKind::kLogits) {
        for (int unit = first; unit < last; ++unit) {
            run_amx_blocks(task, unit, unit * task.unit_blocks, blocks_of_unit(task, unit), row0, row1, shapes);
        }
    } else {  // two blocks at once, also of two units: independent sums hide the latency of a product
        const int left = task.weight->row_blocks();
        const int end = last * task.unit_blocks < left ? last * task.unit_blocks : left;
        for (int block = first * task.unit_blocks, blocks; block < end; block += blocks) {
            blocks = end - block < 2 ? end - block : 2;
            run_amx_blocks(task, -1, block, blocks, row0, row1, shapes);
        }
    }
    tiles_release();
}

static void run_bf16(const LinearTask& task, int first, int last, int row0, int row1) {
    run_amx(task, first, last, row0, row1, false);
}
static void run_all(const LinearTask& task, int first, int last, int row0, int row1) {
    run_amx(task, first, last, row0, row1, true);
}

extern const LinearKernels amx_linear_kernels, amxall_linear_kernels;
const LinearKernels amx_linear_kernels = {run_bf16, kTuning.panels_from - 1};
const LinearKernels amxall_linear_kernels = {run_all, kTuning.panels_from - 1};

}  // namespace headrace::HEADRACE_ISA
#endif
