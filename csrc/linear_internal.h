// What the linear kernels' sources of one instruction set share.
#pragma once

#include "linear_kernels.h"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

// Most rows of one direct kernel: as many as the registers hold. (Plain kernels take long to compile.)
constexpr int kDirectRows = kLanes == 4 ? 2 : 8;

using DirectKernel = void (*)(const uint8_t* data, const uint8_t* values, int64_t ahead, const Segments& segments,
                              const A8Block* x, int64_t stride, float* y);

// [kernel_index][rows - 1]
extern const DirectKernel direct_kernels[kKernelKinds][kDirectRows];

}  // namespace headrace::HEADRACE_ISA
