// Kernels of adapters (LoRA): the low-rank products of one row. The same bits on every instruction set.
#pragma once

#include <stdint.h>

namespace headrace {

struct LowRankKernels {
    // low[k] = down[k] . x for `count` rows of down[count][width], in bfloat16. Sixteen partial sums each, then halves.
    void (*down)(float* low, const uint16_t* down, const float* x, int width, int count);
    // out[i] += low[k] * up[k * stride + i] for k in turn, rounded after each product and each sum.
    void (*up)(float* out, const uint16_t* up, int64_t stride, const float* low, int rank, int columns);
};

}  // namespace headrace
