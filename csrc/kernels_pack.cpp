// Packing and unpacking of one instruction set.
#include "pack_kernels.h"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

#include "pack.inl"

extern const PackKernels pack_kernels;
const PackKernels pack_kernels = {pack, unpack};

}  // namespace headrace::HEADRACE_ISA
