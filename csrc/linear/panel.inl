// Many rows: unpack two row blocks, a stretch of columns at a time, into a panel that stays in L1, and multiply it by
// one step of input rows after the other. Between two stretches the sums are in the scratch. The packed weights of the
// next stretch are prefetched meanwhile. `Products` multiplies a panel by a step of rows: VectorProducts
// (linear/panel_vectors.inl) or AmxProducts (linear/amx_panel.inl). It has kMost, the most rows of a step, and
// multiply(kind, rows, panel, step).
#pragma once

#include "linear/panel_pairs.inl"
#include "linear/tile.inl"

namespace headrace::HEADRACE_ISA {

constexpr int kPanelTiles = kTuning.panel_tiles;
constexpr int kPanelGroups = 2 * kPanelTiles;

// Floats of a step's sums: [2 row blocks][rows][16].
template <class Products>
static constexpr int kStepFloats = 32 * Products::kMost;

// Bytes of a group of 32 columns in the panel: integers [quad][2 row blocks][64], then scales and (if the format has
// them) minima, each float [32 / group][2 row blocks][16].
static constexpr int panel_group_bytes(int group, bool has_min) {
    return 1024 + 128 * (32 / group) * (has_min ? 2 : 1);
}

struct Panel {
    alignas(64) uint8_t bytes[kPanelGroups * panel_group_bytes(16, true)];
};

constexpr int kAheadBytes = 256;  // prefetched of each row block per group of 32 columns

// Unpacks tiles [first, last) of a row block to column 0 or 1 of a panel.
template <PackedKind kind>
static void fill_panel(const uint8_t* data, int first, int last, int column, Panel& panel) {
    constexpr Layout layout = layout_of(kind);
    constexpr int sub = 32 / layout.group();
    const U8v table = load_values(table_of(kind));
    uint8_t* to = panel.bytes + column * 64;
    for (int tile = first; tile < last; ++tile) {
        const auto [block, integers, inner] = place_of_tile(layout, data, tile);
        for (int half = 0; half < 2; ++half, to += panel_group_bytes(layout.group(), layout.has_min())) {
            for (int part = 0; part < kParts; ++part) {
                U8v w[8];
                const U8v values = group_values<kind>(block, inner * 2 + half, part, table);
                load_quads<kind, 0, 8>(integers + half * layout.group_bytes() + part * kPartBytes, values, w);
#if HEADRACE_IS(i8mm)
                zip_group(w);
#endif
#pragma GCC unroll 8
                for (int j = 0; j < 8; ++j) store_u8(to + j * 128 + part * kPartBytes, w[j]);
                float* scale = (float*)(to + 1024) + part * kLanes;
                for (int s = 0; s < sub; ++s) {
                    const int g = (inner * 2 + half) * sub + s;
                    store_f32(scale + s * 32, load_scale<kind>(block, g, part));
                    if constexpr (layout.has_min()) store_f32(scale + (sub + s) * 32, load_min<kind>(block, g, part));
                }
            }
        }
    }
}

HEADRACE_INLINE void fill_panel(const PackedTensor& weight, int block, int first, int last, int column, Panel& panel) {
    const uint8_t* data = weight.data + block * weight.stride;
    switch (weight.kind) {
#define HEADRACE_CASE(kind) \
    case PackedKind::kind:  \
        return fill_panel<PackedKind::kind>(data, first, last, column, panel);
        HEADRACE_INTEGER_KINDS(HEADRACE_CASE)
#undef HEADRACE_CASE
        case PackedKind::kBf16:
            return;
    }
}

// Arguments of a panel kernel: tiles [first, last) of the input rows. After a stretch, `sums` [2 row blocks][rows][16]
// holds the sums of the current segment, and `levels` the joined sums of earlier segments. The first stretch does not
// read them.
struct PanelStep {
    const A8Block* x;
    int64_t stride;
    int first, last;
    const Segments* segments;
    int zero_shift;
    float* sums;
    float* levels;
    const uint8_t* upcoming[2];  // memory to prefetch
};

// Multiplies two row blocks of one tensor, over the columns of the segments, by rows [row0, row1). After the last
// stretch of a step's rows, calls done(row, rows, sums of the step). With `keeps`, and between two stretches, the sums
// of step i are at sums + i * kStepFloats; otherwise every step uses `sums`, which then stays in L1. The levels of step
// i are at levels + i * 3 * kStepFloats. `next`: the row blocks that are read next, or null.
template <class Products, class Done>
static void multiply_panel(Products& products, const LinearTask& task, const PackedTensor& weight, const int* block,
                           const uint8_t* const* next, int row0, int row1, Panel& panel, float* sums, float* levels,
                           bool keeps, const Done& done) {
    const Layout layout = layout_of(weight.kind);
    const int tiles = task.segments->end[task.segments->count - 1];
    const int tile_bytes = layout.block_bytes() / layout.tiles();
    if (tiles - task.segments->begin > kPanelTiles) keeps = true;
    for (int first = task.segments->begin, last; first < tiles; first = last) {
        last = first + step_rows(tiles - first, kPanelTiles);
        const uint8_t* upcoming[2];
        for (int c = 0; c < 2; ++c) {
            fill_panel(weight, block[c], first, last, c, panel);
            const uint8_t* data = weight.data + block[c] * weight.stride + layout.prefix_bytes();
            upcoming[c] = last < tiles ? data + (int64_t)last * tile_bytes : next[c];
        }
        // Bytes of each block that the steps still prefetch for the next stretch. After that they prefetch the fetch
        // list or, at no cost, the panel itself.
        int wanted = kPanelTiles * tile_bytes;
        for (int row = row0, i = 0, rows; row < row1; row += rows, ++i) {
            rows = step_rows(row1 - row, Products::kMost);
            PanelStep step{task.a8.blocks + (int64_t)row * task.a8.tiles,
                           task.a8.tiles,
                           first,
                           last,
                           task.segments,
                           log2_of(layout.zero),
                           keeps ? sums + i * kStepFloats<Products> : sums,
                           levels + i * kSegmentLevels * kStepFloats<Products>,
                           {panel.bytes, panel.bytes}};
            const int fetched = 2 * (last - first) * kAheadBytes;
            const bool weights = wanted > 0 && upcoming[0] && upcoming[1];
            for (int c = 0; c < 2; ++c) {
                const uint8_t* piece = weights ? upcoming[c] : next_piece(task.fetch, fetched);
                if (piece) step.upcoming[c] = piece;
                upcoming[c] += weights ? fetched : 0;
            }
            wanted -= fetched;
            products.multiply(weight.kind, rows, panel, step);
            if (last == tiles) done(row, rows, step.sums);
        }
    }
}

}  // namespace headrace::HEADRACE_ISA
