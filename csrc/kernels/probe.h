// Kernels that measure the limits of a machine: memory read bandwidth and multiply-accumulates per second.
#pragma once

#include <stdint.h>

namespace headrace {

struct ProbeKernels {
    // Reads `bytes` bytes (a multiple of 1024) in order. Returns a checksum, so that the reads are not optimized away.
    uint8_t (*read)(const uint8_t* data, int64_t bytes);
    // `rounds` rounds of multiply-accumulates in registers: int8 (with 4-bit weights), bfloat16, float32. Returns the
    // number of multiply-accumulates. `sink` [kLanes] receives the sums.
    int64_t (*int8)(int64_t rounds, float* sink);
    int64_t (*bf16)(int64_t rounds, float* sink);
    int64_t (*f32)(int64_t rounds, float* sink);
};

}  // namespace headrace
