// Kernels for many rows: unpack two row blocks, a stretch of columns at a time, into a panel that stays in L1, and
// multiply it by one step of activation rows after the other. Between two stretches the sums are in the scratch. The
// packed weights of the next stretch are prefetched meanwhile. Formats of one Form share a kernel.
#pragma once

#include "linear/panel_pairs.inl"
#include "linear/tile.inl"

namespace headrace::HEADRACE_ISA {

constexpr int kPanelRows = kTuning.panel_rows, kPanelTiles = kTuning.panel_tiles;
constexpr int kPanelGroups = 2 * kPanelTiles;
constexpr int kStepFloats = 32 * kPanelRows;  // [2 row blocks][rows][16]

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

// Multiplies quads [quad, end) of a group of 32 columns in the panel, two vectors of each, by `rows` rows.
template <Form form, int rows, int quad, int end>
HEADRACE_INLINE void add_panel_quads(const uint8_t* w, int vector, int half, const A8Block* const* x,
                                     DotSum (*sums)[2]) {
    const U8v w0 = load_u8(w + quad * 128 + vector * kPartBytes),
              w1 = load_u8(w + quad * 128 + (vector + 1) * kPartBytes);
#pragma GCC unroll 6
    for (int m = 0; m < rows; ++m) {
        const Inputs inputs = load_inputs(x[m]->q + half * 32 + quad / 4 * 16);
        sums[m][0] = dot_lane<form.wide, quad % 4>(sums[m][0], w0, inputs);
        sums[m][1] = dot_lane<form.wide, quad % 4>(sums[m][1], w1, inputs);
    }
    if constexpr (quad + 1 < end) add_panel_quads<form, rows, quad + 1, end>(w, vector, half, x, sums);
}

// The same for any number of quads, form.step of them per DotSum.
template <Form form, int rows, int quad, int end>
HEADRACE_INLINE void add_panel_dots(const uint8_t* w, int vector, int half, const A8Block* const* x, I32v (*dots)[2]) {
    constexpr int next = quad + form.step;
    DotSum sums[rows][2];
#pragma GCC unroll 6
    for (int m = 0; m < rows; ++m) sums[m][0] = dot_begin(dots[m][0]), sums[m][1] = dot_begin(dots[m][1]);
    add_panel_quads<form, rows, quad, next>(w, vector, half, x, sums);
#pragma GCC unroll 6
    for (int m = 0; m < rows; ++m) {
        dots[m][0] = dot_end(dots[m][0], sums[m][0]);
        dots[m][1] = dot_end(dots[m][1], sums[m][1]);
    }
    if constexpr (next < end) add_panel_dots<form, rows, next, end>(w, vector, half, x, dots);
}

// Adds a group of 32 columns, from its subgroup s on, to the sums of `rows` rows and two vectors of weights. w: the
// group in the panel.
template <Form form, int rows, int s = 0>
HEADRACE_INLINE void add_panel_group(const uint8_t* w, int vector, int zero_shift, int half, const A8Block* const* x,
                                     F32v (*acc)[2]) {
    constexpr int group = form.group, sub = 32 / group, quads = group / 4;
    constexpr bool has_min = form.has_min;
    I32v dots[rows][2];
#pragma GCC unroll 6
    for (int m = 0; m < rows; ++m) {
        // Shift before the broadcast: a vector shift would use an execution port that the products need.
        dots[m][0] = dots[m][1] = set_i32(form.zero ? negative_sum<group>(*x[m], half, s) << zero_shift : 0);
    }
#if HEADRACE_IS(i8mm)
    add_panel_pairs<rows, s * quads, (s + 1) * quads>(w, vector, half, x, dots);
#else
    add_panel_dots<form, rows, s * quads, (s + 1) * quads>(w, vector, half, x, dots);
#endif
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
        const float* scales = (const float*)(w + 1024) + s * 32 + (vector + c) * kLanes;
        const F32v scale = load_f32(scales), min = has_min ? load_f32(scales + sub * 32) : set_f32(0.0f);
#pragma GCC unroll 6
        for (int m = 0; m < rows; ++m) {
            acc[m][c] = add_group<group, has_min>(acc[m][c], dots[m][c], scale, min, *x[m], half, s);
        }
    }
    // One subgroup after the other: the sums of two would not fit the registers.
    if constexpr (s + 1 < sub) add_panel_group<form, rows, s + 1>(w, vector, zero_shift, half, x, acc);
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

// Ends segment number `segment`: joins its sums with those of the segments before. `levels`: [3][2 * rows] vectors.
template <int rows>
HEADRACE_INLINE void join_panel_segment(int segment, float* levels, F32v (*acc)[2]) {
    constexpr int level_floats = 2 * rows * kLanes;
    for (; segment & 1; segment >>= 1, levels += level_floats) {
#pragma GCC unroll 6
        for (int m = 0; m < rows; ++m) {
            acc[m][0] = load_f32(levels + 2 * m * kLanes) + acc[m][0];
            acc[m][1] = load_f32(levels + (2 * m + 1) * kLanes) + acc[m][1];
        }
    }
}

// Stores the joined sums in `levels` and sets the sums to zero for the next segment.
template <int rows>
HEADRACE_INLINE void leave_panel_segment(int segment, float* levels, F32v (*acc)[2]) {
    levels += 2 * rows * kLanes * __builtin_ctz(~segment);
#pragma GCC unroll 6
    for (int m = 0; m < rows; ++m) {
        store_f32(levels + 2 * m * kLanes, acc[m][0]);
        store_f32(levels + (2 * m + 1) * kLanes, acc[m][1]);
        acc[m][0] = acc[m][1] = set_f32(0.0f);
    }
}

// Adds the panel to the sums of two vectors of weights. `fetches`: also prefetch step.upcoming.
template <Form form, int rows, bool fetches>
HEADRACE_INLINE void add_panel(const Panel& panel, const PanelStep& step, int vector) {
    constexpr int group_bytes = panel_group_bytes(form.group, form.has_min);
    const Segments& segments = *step.segments;
    const int n0 = vector * kLanes, n1 = n0 + kLanes, zero_shift = step.zero_shift;
    float *y0 = step.sums + n0 / 16 * rows * 16 + n0 % 16, *y1 = step.sums + n1 / 16 * rows * 16 + n1 % 16;
    float* levels = step.levels + kSegmentLevels * rows * n0;
    const uint8_t *w = panel.bytes, *upcoming0 = step.upcoming[0], *upcoming1 = step.upcoming[1];
    const A8Block* row[rows];
    F32v acc[rows][2];
#pragma GCC unroll 6
    for (int m = 0; m < rows; ++m) {
        row[m] = step.x + m * step.stride + (step.first - segments.begin);
        acc[m][0] = acc[m][1] = set_f32(0.0f);
        if (step.first > segments.begin) acc[m][0] = load_f32(y0 + m * 16), acc[m][1] = load_f32(y1 + m * 16);
    }
    int segment = 0, tile = step.first;
    while (step.first > segments.begin && segments.end[segment] <= step.first) ++segment;  // joined in the last stretch
    for (;;) {
        for (; segments.count > 1 && segment < segments.count && segments.end[segment] == tile; ++segment) {
            join_panel_segment<rows>(segment, levels, acc);
            if (segment < segments.count - 1) leave_panel_segment<rows>(segment, levels, acc);
        }
        if (tile == step.last) break;
        const int stop = segments.end[segment] < step.last ? segments.end[segment] : step.last;
#pragma GCC unroll 1
        for (const uint8_t* end = w + 2 * (stop - tile) * group_bytes; w != end; w += 2 * group_bytes) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 2
                for (int i = 0; i < kAheadBytes && fetches; i += 64) {
                    prefetch_l2(upcoming0 + half * kAheadBytes + i);
                    prefetch_l2(upcoming1 + half * kAheadBytes + i);
                }
                add_panel_group<form, rows>(w + half * group_bytes, vector, zero_shift, half, row, acc);
            }
#pragma GCC unroll 6
            for (int m = 0; m < rows; ++m) ++row[m];
            upcoming0 += 2 * kAheadBytes;
            upcoming1 += 2 * kAheadBytes;
        }
        tile = stop;
    }
#pragma GCC unroll 6
    for (int m = 0; m < rows; ++m) {
        store_f32(y0 + m * 16, acc[m][0]);
        store_f32(y1 + m * 16, acc[m][1]);
    }
}

template <Form form, int rows>
static void panel_rows(const Panel& panel, const PanelStep& step) {
    add_panel<form, rows, true>(panel, step, 0);
    for (int vector = 2; vector < 2 * kParts; vector += 2) add_panel<form, rows, false>(panel, step, vector);
}

using PanelKernel = void (*)(const Panel& panel, const PanelStep& step);

template <int rows>
HEADRACE_INLINE PanelKernel panel_kernel(PackedKind kind) {
    switch (kind) {
#define HEADRACE_CASE(kind) \
    case PackedKind::kind:  \
        return panel_rows<form_of(layout_of(PackedKind::kind)), rows>;
        HEADRACE_INTEGER_KINDS(HEADRACE_CASE)
#undef HEADRACE_CASE
        default:
            return nullptr;
    }
}

// The kernel for `rows` rows, least <= rows <= kPanelRows.
template <int least = 1>
HEADRACE_INLINE PanelKernel panel_kernel(PackedKind kind, int rows) {
    if constexpr (least < kPanelRows) {
        if (rows > least) return panel_kernel<least + 1>(kind, rows);
    }
    return panel_kernel<least>(kind);
}

// Multiplies two row blocks of one tensor, over the columns of the segments, by rows [row0, row1). After the last
// stretch of a step's rows, calls done(row, rows, sums of the step). With `keeps`, and between two stretches, the sums
// of step i are at sums + i * kStepFloats; otherwise every step uses `sums`, which then stays in L1. The levels of step
// i are at levels + i * 3 * kStepFloats. `next`: the row blocks that are read next, or null.
template <class Done>
static void multiply_panel(const LinearTask& task, const PackedTensor& weight, const int* block,
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
            rows = step_rows(row1 - row, kPanelRows);
            PanelStep step{task.a8.blocks + (int64_t)row * task.a8.tiles,
                           task.a8.tiles,
                           first,
                           last,
                           task.segments,
                           log2_of(layout.zero),
                           keeps ? sums + i * kStepFloats : sums,
                           levels + i * 3 * kStepFloats,
                           {panel.bytes, panel.bytes}};
            const int fetched = 2 * (last - first) * kAheadBytes;
            const bool weights = wanted > 0 && upcoming[0] && upcoming[1];
            for (int c = 0; c < 2; ++c) {
                const uint8_t* piece = weights ? upcoming[c] : next_piece(task.fetch, fetched);
                if (piece) step.upcoming[c] = piece;
                upcoming[c] += weights ? fetched : 0;
            }
            wanted -= fetched;
            panel_kernel(weight.kind, rows)(panel, step);
            if (last == tiles) done(row, rows, step.sums);
        }
    }
}

}  // namespace headrace::HEADRACE_ISA
