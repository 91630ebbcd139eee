#include "linear_kernels.h"
#include "vec/vec.h"
namespace headrace::HEADRACE_ISA {
extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {0};
}
