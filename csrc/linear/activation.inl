// Activation functions, selected by kind.
#pragma once

#include "linear/quantize_act_kernels.h"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

HEADRACE_INLINE F32v activate(Activation kind, F32v x) {
    return kind == Activation::kSilu ? silu(x) : kind == Activation::kGeluTanh ? gelu_tanh(x) : gelu(x);
}

}  // namespace headrace::HEADRACE_ISA
