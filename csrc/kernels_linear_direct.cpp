// Linear kernels for few rows: one for each format and number of rows.
#include "linear_internal.h"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

#include "linear_direct.inl"

extern const DirectKernel direct_kernels[kKernelKinds][kDirectRows];
const DirectKernel direct_kernels[kKernelKinds][kDirectRows] = {
#define HEADRACE_ROWS(kind, rows) direct<PackedKind::kind, rows>
#define HEADRACE_TWO(kind, rows) HEADRACE_ROWS(kind, rows), HEADRACE_ROWS(kind, rows + 1)
#if HEADRACE_LANES == 4
#define HEADRACE_ENTRY(kind) {HEADRACE_TWO(kind, 1)},
#else
#define HEADRACE_ENTRY(kind) \
    {HEADRACE_TWO(kind, 1), HEADRACE_TWO(kind, 3), HEADRACE_TWO(kind, 5), HEADRACE_TWO(kind, 7)},
#endif
    HEADRACE_KERNEL_KINDS(HEADRACE_ENTRY)};

}  // namespace headrace::HEADRACE_ISA
