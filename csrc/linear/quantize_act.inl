// Norms and conversion of activation rows. A row's result depends on that row alone and has the same bits on every
// instruction set: sums use 16 lanes in a fixed order (vec/vec_math.h).
#pragma once

#include "linear/a8.inl"
#include "linear/activation.inl"
#include "linear/quantize_act_kernels.h"

namespace headrace::HEADRACE_ISA {

HEADRACE_INLINE float rms_scale(const float* x, int k, float eps) {
    Lanes16 squares = zero_lanes();
    for (int i = 0; i < k; i += 16) {
        for (int p = 0; p < Lanes16::kParts; ++p) {
            const int left = k - i - p * kLanes;
            if (left <= 0) break;
            const F32v v = left >= kLanes ? load_f32(x + i + p * kLanes) : load_f32(x + i + p * kLanes, left);
            squares.part[p] = fma(v, v, squares.part[p]);
        }
    }
    return 1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)k + eps);
}

// Sum of (x - shift)^power, power 1 or 2.
template <int power>
HEADRACE_INLINE float sum_row(const float* x, int k, float shift) {
    Lanes16 sums = zero_lanes();
    for (int i = 0; i < k; i += 16) {
        for (int p = 0; p < Lanes16::kParts; ++p) {
            const int left = k - i - p * kLanes;
            if (left <= 0) break;
            // Lanes past the end hold `shift`, so they add 0.
            F32v v = set_f32(shift);
            if (left >= kLanes) {
                v = load_f32(x + i + p * kLanes);
            } else {
                float lane[kLanes];
                store_f32(lane, v);
                for (int j = 0; j < left; ++j) lane[j] = x[i + p * kLanes + j];
                v = load_f32(lane);
            }
            v = v - set_f32(shift);
            sums.part[p] = power == 2 ? fma(v, v, sums.part[p]) : sums.part[p] + v;
        }
    }
    return sum_lanes(sums);
}

HEADRACE_INLINE void norm_row(const float* x, int k, const Norm& norm, float* out) {
    float mean = 0.0f, scale;
    if (norm.kind == NormKind::kRms) {
        scale = rms_scale(x, k, norm.eps);
    } else {
        mean = sum_row<1>(x, k, 0.0f) / (float)k;
        scale = 1.0f / __builtin_sqrtf(sum_row<2>(x, k, mean) / (float)k + norm.eps);
    }
    int i = 0;
    for (; i + kLanes <= k; i += kLanes) {
        const F32v v = (load_f32(x + i) - set_f32(mean)) * set_f32(scale);
        store_f32(out + i, norm.bias ? fma(v, load_f32(norm.weight + i), load_f32(norm.bias + i))
                                     : v * load_f32(norm.weight + i));
    }
    for (; i < k; ++i) {
        const float v = (x[i] - mean) * scale;
        out[i] = norm.bias ? __builtin_fmaf(v, norm.weight[i], norm.bias[i]) : v * norm.weight[i];
    }
}

static void to_a8(const float* x, int64_t stride, int first, int last, int k, const Norm& norm, float* scratch,
                  const A8& out) {
    for (int r = first; r < last; ++r) {
        const float* row = x + r * stride;
        if (norm.kind != NormKind::kNone) {
            norm_row(row, k, norm, scratch);
            row = scratch;
        }
        A8Block* blocks = out.blocks + (int64_t)r * out.tiles;
        switch (out.rounding) {
            case Rounding::kGroup:
                quantize_row(row, k, blocks, out.tiles);
                break;
            case Rounding::kToken:
                quantize_token(row, k, out.largest ? out.largest + r : nullptr, blocks, out.tiles);
                break;
            case Rounding::kSplit:
                quantize_split(row, k, out.threshold, out.outliers[r], blocks, out.tiles);
                break;
            case Rounding::kTensor:
                quantize_given(row, k, out.threshold, blocks, out.tiles);
                break;
        }
    }
}

static void to_bf16(const float* x, int64_t stride, int first, int last, int k, const Norm& norm, float* scratch,
                    const Bf16Rows& out) {
    for (int r = first; r < last; ++r) {
        const float* row = x + r * stride;
        if (norm.kind != NormKind::kNone) {
            norm_row(row, k, norm, scratch);
            row = scratch;
        }
        uint16_t* to = out.x + (int64_t)r * out.kp;
        for (int i = 0; i < out.kp; i += kLanes) {
            const int left = k - i;
            store_bf16(to + i, left >= kLanes ? load_f32(row + i) : left > 0 ? load_f32(row + i, left) : set_f32(0.0f));
        }
    }
}

static void norm_rows(const float* x, int64_t stride, int first, int last, int k, const Norm& norm, float* out,
                      int64_t out_stride) {
    for (int r = first; r < last; ++r) norm_row(x + r * stride, k, norm, out + r * out_stride);
}

static void act(Activation kind, const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += kLanes) {
        if (n - i >= kLanes) {
            store_f32(out + i, activate(kind, load_f32(x + i)));
        } else {
            store_f32(out + i, activate(kind, load_f32(x + i, (int)(n - i))), (int)(n - i));
        }
    }
}

static void act_mul(Activation kind, const float* gate, const float* up, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += kLanes) {
        if (n - i >= kLanes) {
            store_f32(out + i, activate(kind, load_f32(gate + i)) * load_f32(up + i));
        } else {
            const int left = (int)(n - i);
            store_f32(out + i, activate(kind, load_f32(gate + i, left)) * load_f32(up + i, left), left);
        }
    }
}

}  // namespace headrace::HEADRACE_ISA
