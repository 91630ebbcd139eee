// Direct linear kernels of one instruction set: one for each format and number of rows. A separate translation unit,
// because it takes long to compile.
#include "linear/direct.inl"
#include "linear/internal.h"

namespace headrace::HEADRACE_ISA {

template <PackedKind kind, int rows = 1>
static constexpr void enter(DirectKernels& table) {
    table.of[kernel_index(kind)][rows - 1] = direct<kind, rows>;
    if constexpr (rows < kTuning.direct_rows) enter<kind, rows + 1>(table);
}

static constexpr DirectKernels table_of_kernels() {
    DirectKernels table{};
#define HEADRACE_ENTER(kind) enter<PackedKind::kind>(table);
    HEADRACE_KERNEL_KINDS(HEADRACE_ENTER)
    return table;
}

extern const DirectKernels direct_kernels;
constexpr DirectKernels direct_kernels = table_of_kernels();

}  // namespace headrace::HEADRACE_ISA
