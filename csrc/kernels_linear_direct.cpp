// Linear kernels for few rows: one for each format and number of rows.
#include "vec/vec.h"

#include "linear_internal.h"

namespace headrace::HEADRACE_ISA {

#include "linear_tile.inl"

#include "linear_direct.inl"

extern const DirectKernel direct_kernels[kPackedKinds - 1][kDirectRows];
const DirectKernel direct_kernels[kPackedKinds - 1][kDirectRows] = {
#define HEADRACE_ENTRY(kind)                                                                            \
    {direct<PackedKind::kind, 1>, direct<PackedKind::kind, 2>, direct<PackedKind::kind, 3>,             \
     direct<PackedKind::kind, 4>, direct<PackedKind::kind, 5>, direct<PackedKind::kind, 6>},
    HEADRACE_INTEGER_KINDS(HEADRACE_ENTRY)
#undef HEADRACE_ENTRY
};

}  // namespace headrace::HEADRACE_ISA
