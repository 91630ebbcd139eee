// The activation functions by name.
#pragma once

HEADRACE_INLINE F32v activate(Activation kind, F32v x) {
    return kind == Activation::kSilu ? silu(x) : kind == Activation::kGeluTanh ? gelu_tanh(x) : gelu(x);
}
