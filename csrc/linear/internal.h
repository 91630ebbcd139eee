// Declarations shared by the translation units of the linear kernels (kernels/linear.cpp, kernels/linear_direct.cpp).
#pragma once

#include "linear/kernels.h"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

using DirectKernel = void (*)(const uint8_t* data, const uint8_t* values, int64_t ahead, const Segments& segments,
                              const A8Block* x, int64_t stride, float* y);

struct DirectKernels {
    DirectKernel of[kKernelKinds][kTuning.direct_rows];  // [kernel_index][rows - 1]
};
extern const DirectKernels direct_kernels;

}  // namespace headrace::HEADRACE_ISA
