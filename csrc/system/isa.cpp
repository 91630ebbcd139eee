#include "system/isa.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "system/os.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace headrace {
namespace {

#if defined(HEADRACE_ARM)
constexpr std::string_view kKnown = "i8mm, neon or plain";
#else
constexpr std::string_view kKnown = "amx, amxall, avx512, avx512vnni, avxvnni, avx2 or plain";
#endif

#if defined(HEADRACE_X86)
struct Registers {
    uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
    return r;
}

// Register state that the operating system saves (XCR0).
uint64_t saved_state() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

bool has(uint32_t word, std::initializer_list<int> bits) {
    for (const int bit : bits) {
        if (!(word >> bit & 1)) return false;
    }
    return true;
}

std::vector<Isa> detect() {
    std::vector<Isa> found{Isa::kPlain};
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0), more = cpuid(7, 1);
    if (!has(one.c, {27})) return found;  // OSXSAVE: without it xgetbv is illegal
    const uint64_t saved = saved_state();
    const bool ymm = (saved & 0x06) == 0x06, zmm = (saved & 0xe6) == 0xe6;
    // FMA, AVX, F16C; AVX2, BMI1, BMI2
    if (!ymm || !has(one.c, {12, 28, 29}) || !has(seven.b, {3, 5, 8})) return found;
    found.insert(found.begin(), Isa::kAvx2);
    if (has(more.a, {4})) found.insert(found.begin(), Isa::kAvxVnni);
    // F, DQ, BW, VL; VNNI
    if (!zmm || !has(seven.b, {16, 17, 30, 31}) || !has(seven.c, {11})) return found;
    found.insert(found.begin(), Isa::kAvx512Vnni);
    if (!has(more.a, {5})) return found;  // BF16
    found.insert(found.begin(), Isa::kAvx512);
    // BF16 and TILE of AMX, and the state of its tiles
    if (has(seven.d, {22, 24}) && (saved & 0x60000) == 0x60000 && os::allow_tiles())
        found.insert(found.begin(), Isa::kAmx);
    return found;
}
#elif defined(HEADRACE_ARM)
std::vector<Isa> detect() {
    constexpr unsigned long kDotProduct = 1UL << 20, kInt8Products = 1UL << 13;  // bits of AT_HWCAP and of AT_HWCAP2
    std::vector<Isa> found{Isa::kPlain};
    const os::Features has = os::features();
    if (!(has.first & kDotProduct)) return found;
    found.insert(found.begin(), Isa::kNeon);
    if (has.second & kInt8Products) found.insert(found.begin(), Isa::kI8mm);
    return found;
}
#else
std::vector<Isa> detect() { return {Isa::kPlain}; }
#endif

}  // namespace

std::string_view isa_name(Isa isa) {
    constexpr std::string_view kNames[] = {"plain", "avx2",   "avxvnni", "avx512vnni", "avx512",
                                           "amx",   "amxall", "neon",    "i8mm"};
    return kNames[static_cast<int>(isa)];
}

Isa parse_isa(std::string_view name) {
    for (const Isa isa : {Isa::kPlain, Isa::kAvx2, Isa::kAvxVnni, Isa::kAvx512Vnni, Isa::kAvx512, Isa::kAmx,
                          Isa::kAmxAll, Isa::kNeon, Isa::kI8mm}) {
        if (name == isa_name(isa)) return isa;
    }
    throw std::invalid_argument("unknown instruction set '" + std::string(name) + "'; use " + std::string(kKnown));
}

const std::vector<Isa>& supported_isas() {
    static const std::vector<Isa> isas = detect();
    return isas;
}

bool runs(Isa isa) {
    const std::vector<Isa>& have = supported_isas();
    const bool all = isa == Isa::kAmxAll;
    if (std::find(have.begin(), have.end(), all ? Isa::kAmx : isa) == have.end()) return false;
#if defined(HEADRACE_X86)
    if (all) return has(cpuid(7, 0).d, {25});  // INT8 of AMX
#endif
    return true;
}

}  // namespace headrace
