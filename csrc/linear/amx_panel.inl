// Products of a panel (linear/panel.inl) with AMX, for all integer kinds. A group of columns of a row block in the
// panel is a right operand: lines of [16 output rows][4 columns], 128 bytes apart. The same columns of at most 16 input
// rows (A8Block::q) are the left one. The integer sums are exact and are scaled as in linear/panel_vectors.inl, so the
// bits are those of every instruction set.
#pragma once

#include "linear/amx.inl"
#include "linear/panel.inl"

namespace headrace::HEADRACE_ISA {

constexpr int kPanelAmxRows = 16;
constexpr int kPanelAmxTiles = 2;  // of 64 columns: their integer sums are stored, then scaled

// Tiles 0 and 1 are sums, 4 input rows, 6 and 7 weights of the two row blocks.
struct AmxPanelShape {
    int rows = 0, group = 0;
};

HEADRACE_INLINE void use_shape(AmxPanelShape& shape, int rows, int group) {
    if (shape.rows == rows && shape.group == group) return;
    shape = {rows, group};
    TileConfig config{};
    config.palette = 1;
    const int lines[8] = {rows, rows, 0, 0, rows, 0, group / 4, group / 4};
    for (int tile = 0; tile < 8; ++tile) {
        if (lines[tile] == 0) continue;
        config.rows[tile] = (uint8_t)lines[tile];
        config.bytes[tile] = tile == 4 ? (uint16_t)group : 64;
    }
    tiles_configure(config);
}

// Integer sums of 64 columns: dots[64 / group][2 row blocks][16][16]. w: the first of their two groups in the panel.
template <Form form>
HEADRACE_INLINE void amx_panel_dots(const uint8_t* w, const A8Block* x, int64_t stride, int32_t* dots) {
    constexpr int sub = 32 / form.group, line = 128;
    for (int half = 0; half < 2; ++half, w += panel_group_bytes(form.group, form.has_min)) {
        for (int s = 0; s < sub; ++s, dots += 2 * 256) {
            const uint8_t* group = w + s * form.group / 4 * line;
            tile_load<4>(x->q + half * 32 + s * form.group, stride * (int64_t)sizeof(A8Block));
            tile_zero<0>();
            tile_load<6>(group, line);
            tile_dot_i8u8<0, 4, 6>();
            tile_zero<1>();
            tile_load<7>(group + 64, line);
            tile_dot_i8u8<1, 4, 7>();
            tile_store<0>(dots, 64);
            tile_store<1>(dots + 256, 64);
        }
    }
}

// Scales the integer sums of `tiles` times 64 columns and adds them to sums[2 row blocks][rows][16].
template <Form form>
HEADRACE_INLINE void amx_panel_scale(const uint8_t* w, int tiles, const PanelStep& step, const A8Block* x, int rows,
                                     const int32_t* dots) {
    constexpr int group = form.group, sub = 32 / group;
    for (int block = 0; block < 2; ++block) {
        for (int m = 0; m < rows; ++m) {
            float* sum = step.sums + (block * rows + m) * 16;
            const int32_t* dot = dots + block * 256 + m * 16;
            const uint8_t* scales = w + 1024;
            F32v acc = load_f32(sum);
            for (int tile = 0; tile < tiles; ++tile) {
                const A8Block& row = x[m * step.stride + tile];
                for (int half = 0; half < 2; ++half, scales += panel_group_bytes(group, form.has_min)) {
                    for (int s = 0; s < sub; ++s, dot += 2 * 256) {
                        const float* scale = (const float*)scales + s * 32 + block * 16;
                        const F32v min = form.has_min ? load_f32(scale + sub * 32) : set_f32(0.0f);
                        const int32_t start = form.zero ? negative_sum<group>(row, half, s) << step.zero_shift : 0;
                        acc = add_group<group, form.has_min>(acc, load_i32(dot) + set_i32(start), load_f32(scale), min,
                                                             row, half, s);
                    }
                }
            }
            store_f32(sum, acc);
        }
    }
}

HEADRACE_INLINE void fetch_upcoming(const PanelStep& step, int at) {
    for (int i = 0; i < 2 * kAheadBytes; i += 64) {
        prefetch_l2(step.upcoming[0] + at + i);
        prefetch_l2(step.upcoming[1] + at + i);
    }
}

template <Form form>
static void multiply_panel_amx(const Panel& panel, const PanelStep& step, int rows) {
    constexpr int tile_bytes = 2 * panel_group_bytes(form.group, form.has_min),
                  sums_of_tile = 64 / form.group * 2 * 256;
    alignas(64) int32_t dots[kPanelAmxTiles * sums_of_tile];
    const Segments& segments = *step.segments;
    const int floats = 2 * rows * 16;
    const auto start = [&] { __builtin_memset(step.sums, 0, sizeof(float) * floats); };
    const uint8_t* w = panel.bytes;
    int segment = 0, tile = step.first;
    if (tile == segments.begin) start();
    while (tile > segments.begin && segments.end[segment] <= tile) ++segment;  // joined in the last stretch
    for (int next;; tile = next) {
        for (; segments.count > 1 && segment < segments.count && segments.end[segment] == tile; ++segment) {
            join_stored_segment(segment, step.levels, step.sums, floats);
            if (segment < segments.count - 1) start();
        }
        if (tile == step.last) return;
        const int stop = segments.end[segment] < step.last ? segments.end[segment] : step.last;
        next = tile + step_rows(stop - tile, kPanelAmxTiles);
        const A8Block* x = step.x + (tile - segments.begin);
        for (int i = tile; i < next; ++i) {
            fetch_upcoming(step, (i - step.first) * 2 * kAheadBytes);
            amx_panel_dots<form>(w + (i - tile) * tile_bytes, x + (i - tile), step.stride,
                                 dots + (i - tile) * sums_of_tile);
        }
        amx_panel_scale<form>(w, next - tile, step, x, rows, dots);
        w += (next - tile) * tile_bytes;
    }
}

namespace {  // no weak symbols

// Tiles must be released after the last panel.
struct AmxProducts {
    static constexpr int kMost = kPanelAmxRows;
    AmxPanelShape shape;
    void multiply(PackedKind kind, int rows, const Panel& panel, const PanelStep& step) {
        use_shape(shape, rows, layout_of(kind).group());
        switch (kind) {
#define HEADRACE_CASE(kind) \
    case PackedKind::kind:  \
        return multiply_panel_amx<form_of(layout_of(PackedKind::kind))>(panel, step, rows);
            HEADRACE_INTEGER_KINDS(HEADRACE_CASE)
#undef HEADRACE_CASE
            case PackedKind::kBf16:
                return;
        }
    }
};

}  // namespace

}  // namespace headrace::HEADRACE_ISA
