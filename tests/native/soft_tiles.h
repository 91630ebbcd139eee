// Kernel tables to test: those of this CPU, and amxall with AMX in plain C++ (HEADRACE_SOFT_TILES, vec/amx.h), which
// runs on every CPU with AVX-512 and BF16.
#pragma once

#include <vector>

#include "attention/kernels.h"
#include "linear/kernels.h"
#include "system/kernels.h"

#if defined(HEADRACE_X86)
namespace headrace::soft {
extern const LinearKernels amxall_linear_kernels;
extern const AttentionKernels amxall_attention_kernels;
}  // namespace headrace::soft
#endif

namespace headrace::test {

inline std::vector<Kernels> tested_kernels() {
    std::vector<Kernels> tables;
    for (const Isa isa : supported_isas()) tables.push_back(kernels_for(isa));
    if (runs(Isa::kAmxAll)) tables.push_back(kernels_for(Isa::kAmxAll));
#if defined(HEADRACE_X86)
    if (!runs(Isa::kAvx512)) return tables;
    Kernels soft = kernels_for(Isa::kAvx512);
    soft.isa = Isa::kAmxAll;
    soft.linear = &soft::amxall_linear_kernels;
    soft.attention = &soft::amxall_attention_kernels;
    tables.push_back(soft);
#endif
    return tables;
}

inline bool is_amx(Isa isa) { return isa == Isa::kAmx || isa == Isa::kAmxAll; }

}  // namespace headrace::test
