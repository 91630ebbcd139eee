// Many rows: 32 rows of weights are unpacked once, over all columns, into a panel that stays in the cache, and then
// multiplied with block after block of activation rows. One kernel for all formats of a group size.

#if HEADRACE_IS(avx512)
constexpr int kPanelRows = 6;  // activation rows x 2 vectors of weights fill the registers
#else
constexpr int kPanelRows = 3;
#endif

// One panel: bytes [group of 32][quad][2 row blocks][64], scales and minima [group][2 row blocks][16].
struct Panel {
    uint8_t* w;
    float* scale;
    float* min;
};

HEADRACE_INLINE Panel panel_at(void* scratch, int tiles, int index) {
    uint8_t* base = (uint8_t*)scratch + (size_t)index * tiles * 64 * (32 + 2 * 32 * 4 / 16);
    float* scale = (float*)(base + (size_t)tiles * 64 * 32);
    return {base, scale, scale + (size_t)tiles * 4 * 32};
}

// Fills column 0 or 1 of a panel with a row block.
template <PackedKind kind>
static void fill_panel(const uint8_t* data, int tiles, int column, const Panel& panel) {
    constexpr Layout layout = layout_of(kind);
    constexpr int sub = 32 / layout.group();
    const U8v table = load_table(kIq4Table);
    for (int tile = 0; tile < tiles; ++tile) {
        const uint8_t* block = data + (int64_t)(tile / layout.tiles()) * layout.block_bytes();
        const int inner = tile % layout.tiles();
        const uint8_t* integers = block + layout.header_bytes() + inner * layout.tile_bytes();
        for (int i = 0; i < layout.tile_bytes(); i += 64) prefetch(integers + kPrefetchBytes + i);
        for (int half = 0; half < 2; ++half) {
            uint8_t* out = panel.w + (int64_t)(tile * 2 + half) * 1024 + column * 64;
            for (int part = 0; part < kParts; ++part) {
                U8v w[8];
                load_group<kind>(integers + half * layout.group_bytes() + part * kPartBytes, table, w);
#pragma GCC unroll 8
                for (int j = 0; j < 8; ++j) store_u8(out + j * 128 + part * kPartBytes, w[j]);
                for (int s = 0; s < sub; ++s) {
                    const int g = (inner * 2 + half) * sub + s;
                    const int64_t to = ((int64_t)(tile * 2 + half) * sub + s) * 32 + column * 16 + part * kLanes;
                    store_f32(panel.scale + to, load_scale<kind>(block, g, part));
                    if constexpr (layout.has_min()) store_f32(panel.min + to, load_min<kind>(block, g, part));
                }
            }
        }
    }
}

HEADRACE_INLINE void fill_panel(const PackedTensor& weight, int block, int column, const Panel& panel) {
    const uint8_t* data = weight.data + block * weight.stride;
    switch (weight.kind) {
#define HEADRACE_CASE(kind) \
    case PackedKind::kind: return fill_panel<PackedKind::kind>(data, weight.tiles(), column, panel);
        HEADRACE_INTEGER_KINDS(HEADRACE_CASE)
#undef HEADRACE_CASE
        case PackedKind::kBf16: return;
    }
}

// One group of 32 columns: `rows` rows times 2 vectors of weights.
template <int group, bool has_min, bool wide, int rows>
HEADRACE_INLINE void add_panel_group(const Panel& panel, int64_t g, int vector, int zero_shift, int half,
                                     const A8Block* const* x, int tile, F32v (*acc)[2]) {
    constexpr int sub = 32 / group;
    const uint8_t* w = panel.w + g * 1024 + vector * kPartBytes;
    I32v dots[rows][2][sub];
#pragma GCC unroll 6
    for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 2
        for (int s = 0; s < sub; ++s) {
            const I32v start = has_min ? set_i32(0) : start_dot<group>(x[m][tile], half, s, zero_shift);
            dots[m][0][s] = start;
            dots[m][1][s] = start;
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        const U8v w0 = load_u8(w + j * 128), w1 = load_u8(w + j * 128 + kPartBytes);
#pragma GCC unroll 6
        for (int m = 0; m < rows; ++m) {
            const int8_t* a = x[m][tile].q + half * 32 + 4 * j;
            I32v* d0 = &dots[m][0][j * sub / 8];
            I32v* d1 = &dots[m][1][j * sub / 8];
            *d0 = dot<wide>(*d0, w0, a);
            *d1 = dot<wide>(*d1, w1, a);
        }
    }
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
        F32v scale[sub], min[sub];
#pragma GCC unroll 2
        for (int s = 0; s < sub; ++s) {
            const int64_t from = (g * sub + s) * 32 + (vector + c) * kLanes;
            scale[s] = load_f32(panel.scale + from);
            if (has_min) min[s] = load_f32(panel.min + from);
        }
#pragma GCC unroll 6
        for (int m = 0; m < rows; ++m) {
            acc[m][c] = add_group<group, has_min>(acc[m][c], dots[m][c], scale, min, x[m][tile], half);
        }
    }
}

// A panel times `rows` rows into y[2 row blocks][rows][16].
template <int group, bool has_min, bool wide, int rows>
static void panel_rows(const Panel& panel, int zero, const Segments& segments, const A8Block* x, int64_t stride, float* y) {
    const A8Block* row[rows];
    for (int m = 0; m < rows; ++m) row[m] = x + m * stride;
    const int zero_shift = log2_of(zero);
    for (int vector = 0; vector < 2 * kParts; vector += 2) {
        F32v acc[rows][2], level[kSegmentLevels][rows * 2];
        for (int s = 0, tile = 0; s < segments.count; ++s) {
            for (int m = 0; m < rows; ++m) acc[m][0] = acc[m][1] = set_f32(0.0f);
            for (; tile < segments.end[s]; ++tile) {
                for (int half = 0; half < 2; ++half) {
                    add_panel_group<group, has_min, wide, rows>(panel, 2 * tile + half, vector, zero_shift, half, row,
                                                                tile, acc);
                }
            }
            if (segments.count > 1) join_segment<rows * 2>(s, level, acc[0]);
        }
        for (int c = 0; c < 2; ++c) {
            const int n = (vector + c) * kLanes;
            for (int m = 0; m < rows; ++m) store_f32(y + (n / 16 * rows + m) * 16 + n % 16, acc[m][c]);
        }
    }
}

using PanelKernel = void (*)(const Panel& panel, int zero, const Segments& segments, const A8Block* x, int64_t stride,
                             float* y);

template <int rows>
HEADRACE_INLINE PanelKernel panel_kernel(const Layout& layout) {
    if (layout.group() == 16) return layout.has_min() ? panel_rows<16, true, false, rows> : panel_rows<16, false, false, rows>;
    if (layout.has_min()) return panel_rows<32, true, false, rows>;
    return kWideDiffers && layout.wide() ? panel_rows<32, false, kWideDiffers, rows> : panel_rows<32, false, false, rows>;
}

HEADRACE_INLINE PanelKernel panel_kernel(const Layout& layout, int rows) {
    switch (rows) {
        case 1: return panel_kernel<1>(layout);
        case 2: return panel_kernel<2>(layout);
#if HEADRACE_IS(avx512)
        case 3: return panel_kernel<3>(layout);
        case 4: return panel_kernel<4>(layout);
        case 5: return panel_kernel<5>(layout);
        default: return panel_kernel<6>(layout);
#else
        default: return panel_kernel<3>(layout);
#endif
    }
}
