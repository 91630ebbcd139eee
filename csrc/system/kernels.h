// The tables of kernels of one instruction set, and the choice of one at run time. The family tables are only declared
// here, so that every package may hold a `Kernels`; a file that calls a kernel includes the header of its family.
//
// To add a family of kernels, "thing":
//   thing/kernels.h     plain data and `struct ThingKernels { void (*run)(...); ... };`
//   kernels/thing.cpp   `#include "vec/vec.h"` (or "thing/thing.inl", which does), then in namespace
//                       headrace::HEADRACE_ISA the code and
//                       `extern const ThingKernels thing_kernels; const ThingKernels thing_kernels = {...};`
//   here                one declaration, one member of Kernels
//   kernels.cpp         one line in HEADRACE_DECLARE_TABLES, one in HEADRACE_TABLE
// The build compiles kernels/*.cpp once per instruction set (csrc/kernels.cmake); vec/vec.h states the rules.
#pragma once

#include "system/isa.h"

namespace headrace {

struct AttentionKernels;
struct LinearKernels;
struct LowRankKernels;
struct PackKernels;
struct ProbeKernels;
struct QuantizeKernels;
struct SampleKernels;

struct Kernels {
    Isa isa;
    const AttentionKernels* attention;
    const LinearKernels* linear;
    const LowRankKernels* low_rank;
    const PackKernels* pack;
    const ProbeKernels* probe;
    const QuantizeKernels* quantize;
    const SampleKernels* sample;
};

// The table in use: of the best instruction set of this CPU, or of the one in the environment variable HEADRACE_ISA.
// Chosen at the first call. Throws std::invalid_argument if HEADRACE_ISA is unknown or not supported here.
const Kernels& kernels();

// The table of one instruction set; tests run several in one process. Throws std::invalid_argument if the CPU does not
// support it.
const Kernels& kernels_for(Isa isa);

}  // namespace headrace
