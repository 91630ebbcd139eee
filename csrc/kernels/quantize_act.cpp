// Norms, conversion of activations and activation functions of one instruction set.
#include "linear/quantize_act.inl"

namespace headrace::HEADRACE_ISA {

extern const QuantizeKernels quantize_kernels;
const QuantizeKernels quantize_kernels = {to_a8, to_bf16, norm_rows, act, act_mul};

}  // namespace headrace::HEADRACE_ISA
