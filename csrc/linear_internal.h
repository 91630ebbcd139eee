// What the linear kernels' sources of one instruction set share. Include after vec/vec.h.
#pragma once

#include "linear_kernels.h"

namespace headrace::HEADRACE_ISA {

constexpr int kDirectRows = 6;  // most rows of one direct kernel

using DirectKernel = void (*)(const uint8_t* data, const Segments& segments, const A8Block* x, int64_t stride, float* y);

// [kind][rows - 1]
extern const DirectKernel direct_kernels[kPackedKinds - 1][kDirectRows];

}  // namespace headrace::HEADRACE_ISA
