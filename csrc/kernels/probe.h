// What a machine can do, measured as kernels use it: how fast memory is read, and how many products a second there are.
#pragma once

#include <stdint.h>

namespace headrace {

struct ProbeKernels {
    // Reads `bytes` bytes (a multiple of 1024) as a kernel would, in order.
    uint8_t (*read)(const uint8_t* data, int64_t bytes);
    // Products and their sums in registers, `rounds` times, of int8 (weights of 4 bits), bfloat16 and float32: how many
    // multiplications that was. `sink` gets what came of them.
    int64_t (*int8)(int64_t rounds, float* sink);
    int64_t (*bf16)(int64_t rounds, float* sink);
    int64_t (*f32)(int64_t rounds, float* sink);
};

}  // namespace headrace
