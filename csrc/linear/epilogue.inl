// Epilogues: they add the bias to the sums of a unit and write the result. The sums are y[block][rows][16], for `rows`
// input rows from `row` on.
#pragma once

#include "linear/a8.inl"
#include "linear/activation.inl"
#include "linear/tile.inl"

namespace headrace::HEADRACE_ISA {

constexpr int kEpilogueRows = 16;  // most input rows of one call

HEADRACE_INLINE F32v with_bias(const PackedTensor& weight, int block, int part, F32v y) {
    return weight.bias ? y + load_f32(weight.bias + block * 16 + part * kLanes) : y;
}

static void finish_store(const LinearTask& task, int block, int blocks, int row, int rows, const float* y) {
    const PackedTensor& weight = *task.weight;
    const bool add = task.epilogue.kind == EpilogueKind::kAdd;
    for (int b = 0; b < blocks; ++b) {
        for (int m = 0; m < rows; ++m) {
            for (int part = 0; part < kParts; ++part) {
                const int n = (block + b) * 16 + part * kLanes, lanes = weight.n - n < kLanes ? weight.n - n : kLanes;
                if (lanes <= 0) break;
                float* out = task.epilogue.out + (row + m) * task.epilogue.stride + n;
                F32v v = with_bias(weight, block + b, part, load_f32(y + (b * rows + m) * 16 + part * kLanes));
                if (lanes == kLanes) {
                    store_f32(out, add ? load_f32(out) + v : v);
                } else {
                    store_f32(out, add ? load_f32(out, lanes) + v : v, lanes);
                }
            }
        }
    }
}

// Writes 32 outputs of `rows` rows to columns [32 * unit, 32 * unit + 32) of the next layer's input. The last unit also
// writes zeros up to a multiple of 64 columns.
HEADRACE_INLINE void put_gated(const Epilogue& epilogue, int unit, int row, int rows, int n, const float (*value)[32]) {
    const int columns = n - 32 * unit < 32 ? n - 32 * unit : 32;
    const bool pad = unit % 2 == 0 && columns + 32 * unit == n;
    if (epilogue.a8.blocks) {
        A8Block* block = epilogue.a8.blocks + (int64_t)row * epilogue.a8.tiles + unit / 2;
        GroupScale scale[kEpilogueRows];
        for (int m = 0; m < rows; ++m) scale[m] = group_scale(value[m]);
        for (int m = 0; m < rows; ++m) {
            put_group(value[m], scale[m], block + (int64_t)m * epilogue.a8.tiles, unit % 2);
        }
        const float zeros[32] = {};
        for (int m = 0; pad && m < rows; ++m) quantize_group(zeros, block + (int64_t)m * epilogue.a8.tiles, 1);
    }
    for (int m = 0; epilogue.bf16.x && m < rows; ++m) {
        uint16_t* to = epilogue.bf16.x + (int64_t)(row + m) * epilogue.bf16.kp + 32 * unit;
        for (int i = 0; i < 32; i += kLanes) store_bf16(to + i, load_f32(value[m] + i));
        for (int i = 32; pad && i < 64; i += kLanes) store_bf16(to + i, set_f32(0.0f));
    }
    for (int m = 0; epilogue.out && m < rows; ++m) {
        float* to = epilogue.out + (int64_t)(row + m) * epilogue.stride + 32 * unit;
        for (int i = 0; i < columns; ++i) to[i] = value[m][i];
    }
}

// y: sums of the gate; up: sums of up.
static void finish_gated(const LinearTask& task, int unit, int blocks, int row, int rows, const float* y,
                         const float* up) {
    // All activations first, then all quantization: in both loops consecutive operations are independent.
    alignas(64) float value[kEpilogueRows][32];
    if (blocks < 2) __builtin_memset(value, 0, sizeof value);
    for (int b = 0; b < blocks; ++b) {
        for (int m = 0; m < rows; ++m) {
            for (int part = 0; part < kParts; ++part) {
                const int at = (b * rows + m) * 16 + part * kLanes, block = 2 * unit + b;
                const F32v g = with_bias(*task.weight, block, part, load_f32(y + at));
                const F32v u = with_bias(*task.up, block, part, load_f32(up + at));
                store_f32(value[m] + b * 16 + part * kLanes, activate(task.epilogue.act, g) * u);
            }
        }
    }
    put_gated(task.epilogue, unit, row, rows, task.weight->n, value);
}

static void finish_logits(const LinearTask& task, int unit, int blocks, int row, int rows, const float* y) {
    const PackedTensor& weight = *task.weight;
    const Epilogue& epilogue = task.epilogue;
    const F32v lowest = set_f32(-__builtin_inff()), cap = set_f32(epilogue.softcap);
    for (int m = 0; m < rows; ++m) {
        Lanes16 largest;
        for (int part = 0; part < kParts; ++part) largest.part[part] = lowest;
        I32v sizes =
            set_i32(0);  // maximum of the absolute values' bits as integers: finds NaN, which the float max ignores
        for (int b = 0; b < blocks; ++b) {
            for (int part = 0; part < kParts; ++part) {
                const int n = (unit * 4 + b) * 16 + part * kLanes,
                          lanes = weight.n - n < kLanes ? weight.n - n : kLanes;
                if (lanes <= 0) break;
                F32v v = with_bias(weight, unit * 4 + b, part, load_f32(y + (b * rows + m) * 16 + part * kLanes));
                v = v * set_f32(epilogue.scale);
                if (epilogue.softcap > 0.0f) v = cap * tanh(v / cap);
                float* out = epilogue.out + (row + m) * epilogue.stride + n;
                if (lanes == kLanes) {
                    store_f32(out, v);
                } else {
                    float lane[kLanes];
                    store_f32(lane, lowest);
                    store_f32(lane, v, lanes);
                    store_f32(out, v, lanes);
                    v = load_f32(lane);
                }
                largest.part[part] = max(largest.part[part], v);
                sizes = max(sizes, as_i32(v) & 0x7fffffff);
            }
        }
        if (!epilogue.block_max) continue;
        const bool numbers = max_i32(sizes) <= 0x7f800000;
        epilogue.block_max[(row + m) * epilogue.max_stride + unit] = numbers ? max_lanes(largest) : __builtin_nanf("");
    }
}

// Row blocks of a unit; the last unit may have fewer.
HEADRACE_INLINE int blocks_of_unit(const LinearTask& task, int unit) {
    const int left = task.weight->row_blocks() - unit * task.unit_blocks;
    return left < task.unit_blocks ? left : task.unit_blocks;
}

HEADRACE_INLINE void finish(const LinearTask& task, int unit, int blocks, int row, int rows, const float* y,
                            const float* up) {
    if (task.epilogue.kind == EpilogueKind::kGated) {
        finish_gated(task, unit, blocks, row, rows, y, up);
    } else if (task.epilogue.kind == EpilogueKind::kLogits) {
        finish_logits(task, unit, blocks, row, rows, y);
    } else {
        finish_store(task, unit * task.unit_blocks, blocks, row, rows, y);
    }
}

}  // namespace headrace::HEADRACE_ISA
