#include "system/kernels.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace headrace {

#define HEADRACE_DECLARE_TABLES(isa)                 \
    namespace isa {                                  \
    extern const AttentionKernels attention_kernels; \
    extern const LinearKernels linear_kernels;       \
    extern const LowRankKernels low_rank_kernels;    \
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
namespace avx512 {
extern const LinearKernels amx_linear_kernels, amxall_linear_kernels;
extern const AttentionKernels amxall_attention_kernels;
}  // namespace avx512
#elif defined(HEADRACE_ARM)
HEADRACE_DECLARE_TABLES(neon)
HEADRACE_DECLARE_TABLES(i8mm)
#endif

namespace {

#define HEADRACE_TABLE(isa, id)                            \
    constexpr Kernels isa##_table{id,                      \
                                  &isa::attention_kernels, \
                                  &isa::linear_kernels,    \
                                  &isa::low_rank_kernels,  \
                                  &isa::pack_kernels,      \
                                  &isa::probe_kernels,     \
                                  &isa::quantize_kernels,  \
                                  &isa::sample_kernels};

HEADRACE_TABLE(plain, Isa::kPlain)
#if defined(HEADRACE_X86)
HEADRACE_TABLE(avx2, Isa::kAvx2)
HEADRACE_TABLE(avxvnni, Isa::kAvxVnni)
HEADRACE_TABLE(avx512vnni, Isa::kAvx512Vnni)
HEADRACE_TABLE(avx512, Isa::kAvx512)

constexpr Kernels with_amx() {
    Kernels table = avx512_table;
    table.isa = Isa::kAmx;
    table.linear = &avx512::amx_linear_kernels;
    return table;
}
constexpr Kernels amx_table = with_amx();

constexpr Kernels with_all_of_amx() {
    Kernels table = avx512_table;
    table.isa = Isa::kAmxAll;
    table.linear = &avx512::amxall_linear_kernels;
    table.attention = &avx512::amxall_attention_kernels;
    return table;
}
constexpr Kernels amxall_table = with_all_of_amx();
#elif defined(HEADRACE_ARM)
HEADRACE_TABLE(neon, Isa::kNeon)
HEADRACE_TABLE(i8mm, Isa::kI8mm)
#endif

const Kernels& choose() {
    const char* wanted = std::getenv("HEADRACE_ISA");
    return kernels_for(wanted && *wanted ? parse_isa(wanted) : supported_isas().front());
}

}  // namespace

const Kernels& kernels_for(Isa isa) {
    if (!runs(isa)) {
        throw std::invalid_argument("this CPU does not run " + std::string(isa_name(isa)) +
                                    " kernels; set HEADRACE_ISA to " + std::string(isa_name(supported_isas().front())) +
                                    " or leave it out");
    }
    switch (isa) {
#if defined(HEADRACE_X86)
        case Isa::kAmx:
            return amx_table;
        case Isa::kAmxAll:
            return amxall_table;
        case Isa::kAvx512:
            return avx512_table;
        case Isa::kAvx512Vnni:
            return avx512vnni_table;
        case Isa::kAvxVnni:
            return avxvnni_table;
        case Isa::kAvx2:
            return avx2_table;
#elif defined(HEADRACE_ARM)
        case Isa::kI8mm:
            return i8mm_table;
        case Isa::kNeon:
            return neon_table;
#endif
        default:
            return plain_table;
    }
}

const Kernels& kernels() {
    static const Kernels& chosen = choose();
    return chosen;
}

}  // namespace headrace
