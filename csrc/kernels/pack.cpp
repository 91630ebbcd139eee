// Packing kernels of one instruction set.
#include "pack/pack.inl"

namespace headrace::HEADRACE_ISA {

extern const PackKernels pack_kernels;
const PackKernels pack_kernels = {pack, unpack};

}  // namespace headrace::HEADRACE_ISA
