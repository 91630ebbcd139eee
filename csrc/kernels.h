// The tables of kernels: one of each kind per instruction set, chosen once at run time.
//
// To add a group of kernels, "thing":
//   thing_kernels.h     plain data and `struct ThingKernels { void (*run)(...); ... };`
//   kernels_thing.cpp   `#include "vec/vec.h"` (or "thing.inl", which does), then in namespace
//                       headrace::HEADRACE_ISA the code and
//                       `extern const ThingKernels thing_kernels; const ThingKernels thing_kernels = {...};`
//   here                the header, one line in HEADRACE_DECLARE_TABLES, one member of Kernels
//   kernels.cpp         one line in HEADRACE_TABLE
// The build compiles kernels_*.cpp once per instruction set (csrc/kernels.cmake); vec/vec.h states the rules.
#pragma once

#include "attention_kernels.h"
#include "isa.h"
#include "linear_kernels.h"
#include "pack_kernels.h"
#include "probe_kernels.h"
#include "quantize_act_kernels.h"
#include "sample_kernels.h"

namespace headrace {

#define HEADRACE_DECLARE_TABLES(isa)                 \
    namespace isa {                                  \
    extern const AttentionKernels attention_kernels; \
    extern const LinearKernels linear_kernels;       \
    extern const PackKernels pack_kernels;           \
    extern const ProbeKernels probe_kernels;         \
    extern const QuantizeKernels quantize_kernels;   \
    extern const SampleKernels sample_kernels;       \
    }

HEADRACE_DECLARE_TABLES(plain)
#if defined(HEADRACE_X86)
HEADRACE_DECLARE_TABLES(avx2)
HEADRACE_DECLARE_TABLES(avxvnni)
HEADRACE_DECLARE_TABLES(avx512vnni)
HEADRACE_DECLARE_TABLES(avx512)
#elif defined(HEADRACE_ARM)
HEADRACE_DECLARE_TABLES(neon)
HEADRACE_DECLARE_TABLES(i8mm)
#endif

struct Kernels {
    Isa isa;
    const AttentionKernels* attention;
    const LinearKernels* linear;
    const PackKernels* pack;
    const ProbeKernels* probe;
    const QuantizeKernels* quantize;
    const SampleKernels* sample;
};

// The table in use: the best the CPU has, or what the environment variable HEADRACE_ISA names.
// Throws std::invalid_argument when that is unknown or not supported here. Read once, at the first call.
const Kernels& kernels();

// The table of one instruction set (tests run several in one process); throws when the CPU lacks it.
const Kernels& kernels_for(Isa isa);

}  // namespace headrace
