// Products of a panel (linear/panel.inl) with vectors. Formats of one Form share a kernel.
#pragma once

#include "linear/panel.inl"

namespace headrace::HEADRACE_ISA {

constexpr int kPanelRows = kTuning.panel_rows;

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

namespace {  // no weak symbols

struct VectorProducts {
    static constexpr int kMost = kPanelRows;
    void multiply(PackedKind kind, int rows, const Panel& panel, const PanelStep& step) const {
        panel_kernel(kind, rows)(panel, step);
    }
};

}  // namespace

}  // namespace headrace::HEADRACE_ISA
