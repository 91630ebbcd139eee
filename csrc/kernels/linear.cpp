// Linear kernels of one instruction set: runs a unit with direct kernels or panels, then its epilogue.
#include "linear/bf16.inl"
#include "linear/by_row.inl"
#include "linear/internal.h"
#include "linear/panel_vectors.inl"
#include "linear/run_panels.inl"

namespace headrace::HEADRACE_ISA {

constexpr int kMostBlocks = 4;                               // row blocks per unit
using Sums = float[kMostBlocks * kTuning.direct_rows * 16];  // [block][rows][16]

static_assert(kTuning.by_row_rows <= kTuning.direct_rows, "a pass may have tensors of both kinds");
static_assert(kTuning.bf16_rows <= kTuning.direct_rows, "Sums must hold the rows of a pass");

// Distance from `data` to the memory that pass number `pass` over a row block prefetches. Pass 0 prefetches its own
// weights. Later passes prefetch a piece of the fetch list; if it is empty, pass 1 prefetches the next unit's block.
HEADRACE_INLINE int64_t fetched_ahead(const LinearTask& task, const PackedTensor& weight, int block, int pass,
                                      const uint8_t* data) {
    const uint8_t* piece = pass > 0 ? next_piece(task.fetch, row_block_bytes(weight.kind, weight.k)) : nullptr;
    if (piece) return piece - data;
    const bool next = pass == 1 && block + task.unit_blocks < weight.row_blocks();
    return next ? task.unit_blocks * weight.stride : kPrefetchBytes;
}

// Whether all tensors of a task are multiplied by row.
HEADRACE_INLINE bool all_by_row(const LinearTask& task) {
    const bool gated = task.epilogue.kind == EpilogueKind::kGated;
    return by_row(task.weight->kind, task.a8) && (!gated || by_row(task.up->kind, task.a8));
}

// Row blocks [first, first + blocks) of the weight, and of a gated layer with those of up in the order of memory.
static void multiply_by_row(const LinearTask& task, int first, int blocks, int row, int rows, int pass, float* y,
                            float* up) {
    RowBlock all[kMostRowBlocks];
    const bool gated = task.epilogue.kind == EpilogueKind::kGated;
    // Two row blocks at once: pass 0 prefetches the next two, since 8 KB from the first one are those of the second.
    const bool pairs = kParts == 1 && (gated || blocks > 1);
    int count = 0;
    const auto add = [&](const PackedTensor& weight, int b, float* to) {
        const uint8_t* data = weight.data + (first + b) * weight.stride;
        const int64_t pair = gated ? weight.stride : 2 * weight.stride;
        const int64_t ahead = pass == 0 && pairs ? pair : fetched_ahead(task, weight, first + b, pass, data);
        all[count++] = {data, ahead, to + b * rows * 16};
    };
    for (int b = 0; b < blocks; ++b) {
        add(*task.weight, b, y);
        if (gated) add(*task.up, b, up);
    }
    multiply_by_row(all, count, *task.segments, task.a8.blocks + (int64_t)row * task.a8.tiles, task.a8.tiles, rows);
}

// Multiplies row blocks [block, block + blocks) of one tensor, at most four; result in y. `pass`: number of earlier
// passes over these weights.
static void multiply(const LinearTask& task, const PackedTensor& weight, int block, int blocks, int row, int rows,
                     int pass, float* y) {
    const Segments& segments = *task.segments;
    if (weight.kind == PackedKind::kBf16) {
        const uint16_t* x = task.bf16.x + (int64_t)row * task.bf16.kp;
        for (int b = 0; b < blocks; b += 2) {
            const int two = blocks - b < 2 ? blocks - b : 2;
            bf16_blocks(weight, block + b, two, segments, x, task.bf16.kp, rows, y + b * rows * 16);
        }
        return;
    }
    if (by_row(weight.kind, task.a8)) {  // next to a tensor of another kind
        LinearTask alone = task;
        alone.weight = &weight;
        alone.epilogue.kind = EpilogueKind::kStore;
        return multiply_by_row(alone, block, blocks, row, rows, pass, y, nullptr);
    }
    const DirectKernel kernel = direct_kernels.of[kernel_index(weight.kind)][rows - 1];
    const A8Block* x = task.a8.blocks + (int64_t)row * task.a8.tiles;
    for (int b = 0; b < blocks; ++b) {
        const uint8_t* data = weight.data + (block + b) * weight.stride;
        const int64_t ahead = fetched_ahead(task, weight, block + b, pass, data);
        kernel(data, table_of(weight.kind), ahead, segments, x, task.a8.tiles, y + b * rows * 16);
    }
}

static void run_direct(const LinearTask& task, int unit, int row0, int row1, int most) {
    const int blocks = blocks_of_unit(task, unit), first = unit * task.unit_blocks;
    for (int row = row0, pass = 0, rows; row < row1; row += rows, ++pass) {
        rows = step_rows(row1 - row, most);
        alignas(64) Sums y;
        float* up = y + blocks * rows * 16;
        const bool gated = task.epilogue.kind == EpilogueKind::kGated;
        if (task.epilogue.kind == EpilogueKind::kAdd) fetch_sums(task, first, row, rows);
        // Gate and up in memory order (their row blocks are interleaved); bfloat16 processes two blocks at a time.
        const bool whole = all_by_row(task);
        const int step = gated && task.weight->kind != PackedKind::kBf16 ? 1 : blocks;
        if (whole) multiply_by_row(task, first, blocks, row, rows, pass, y, up);
        for (int b = 0; b < blocks && !whole; b += step) {
            multiply(task, *task.weight, first + b, step, row, rows, pass, y + b * rows * 16);
            if (gated) multiply(task, *task.up, first + b, step, row, rows, pass, up + b * rows * 16);
        }
        add_outliers(task, *task.weight, first, blocks, row, rows, y);
        if (gated) add_outliers(task, *task.up, first, blocks, row, rows, up);
        finish(task, unit, blocks, row, rows, y, up);
    }
}

// Most rows of a pass, or 0: panels.
HEADRACE_INLINE int rows_of_pass(const LinearTask& task) {
    if (task.weight->kind == PackedKind::kBf16) return kTuning.bf16_rows;
    const bool gated = task.epilogue.kind == EpilogueKind::kGated;
    if (by_row(task.weight->kind, task.a8) || (gated && by_row(task.up->kind, task.a8))) return kTuning.by_row_rows;
    return task.panels ? 0 : kTuning.direct_rows;
}

static void run(const LinearTask& task, int first, int last, int row0, int row1) {
    const int most = rows_of_pass(task);
    VectorProducts products;
    for (int unit = first; unit < last; ++unit) {
        if (most == 0) {
            run_panels(products, task, unit, row0, row1);
        } else {
            run_direct(task, unit, row0, row1, most);
        }
    }
}

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {run, kTuning.panels_from - 1};

}  // namespace headrace::HEADRACE_ISA
