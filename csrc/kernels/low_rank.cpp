// Low-rank kernels of one instruction set.
#include "low_rank/kernels.h"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

constexpr int kSums = 16, kVectors = kSums / kLanes;
constexpr int kTogether = 4;  // rows or vectors at a time, so that additions of several sums overlap

HEADRACE_INLINE float widened(uint16_t bf16) {
    const uint32_t bits = (uint32_t)bf16 << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

template <int kRows>
static void dots(float* low, const uint16_t* down, const float* x, int width) {
    F32v sums[kRows][kVectors];
    for (auto& row : sums) {
        for (F32v& sum : row) sum = set_f32(0.0f);
    }
    int i = 0;
    for (; i + kSums <= width; i += kSums) {
        for (int v = 0; v < kVectors; ++v) {
            const int at = i + v * kLanes;
            const F32v factor = load_f32(x + at);
            for (int r = 0; r < kRows; ++r)
                sums[r][v] = sums[r][v] + load_bf16(down + int64_t{r} * width + at) * factor;
        }
    }
    for (int r = 0; r < kRows; ++r) {
        float parts[kSums];
        for (int v = 0; v < kVectors; ++v) store_f32(parts + v * kLanes, sums[r][v]);
        for (int j = 0; i + j < width; ++j) parts[j] += widened(down[int64_t{r} * width + i + j]) * x[i + j];
        for (int half = kSums / 2; half; half /= 2) {
            for (int j = 0; j < half; ++j) parts[j] += parts[j + half];
        }
        low[r] = parts[0];
    }
}

static void down(float* low, const uint16_t* down, const float* x, int width, int count) {
    int k = 0;
    for (; k + kTogether <= count; k += kTogether) dots<kTogether>(low + k, down + int64_t{k} * width, x, width);
    for (; k < count; ++k) dots<1>(low + k, down + int64_t{k} * width, x, width);
}

static void up(float* out, const uint16_t* up, int64_t stride, const float* low, int rank, int columns) {
    int i = 0;
    for (; i + kTogether * kLanes <= columns; i += kTogether * kLanes) {
        F32v sums[kTogether];
        for (int v = 0; v < kTogether; ++v) sums[v] = load_f32(out + i + v * kLanes);
        for (int k = 0; k < rank; ++k) {
            const F32v factor = set_f32(low[k]);
            const uint16_t* weights = up + k * stride + i;
            for (int v = 0; v < kTogether; ++v) sums[v] = sums[v] + factor * load_bf16(weights + v * kLanes);
        }
        for (int v = 0; v < kTogether; ++v) store_f32(out + i + v * kLanes, sums[v]);
    }
    for (; i < columns; ++i) {
        for (int k = 0; k < rank; ++k) out[i] += low[k] * widened(up[k * stride + i]);
    }
}

extern const LowRankKernels low_rank_kernels;
const LowRankKernels low_rank_kernels = {down, up};

}  // namespace headrace::HEADRACE_ISA
