// Which instruction sets the core is built for, which of them this CPU runs, and which one is used.
#pragma once

#include <string_view>
#include <vector>

namespace headrace {

enum class Isa { kPlain, kAvx2, kAvxVnni, kAvx512Vnni, kAvx512, kNeon, kI8mm };

// "plain", "avx2", "avxvnni" (AVX2 with VNNI), "avx512vnni" (AVX-512 with VNNI) or "avx512" (with VNNI and BF16);
// on Arm "neon" (with the dot product) or "i8mm" (with that of unsigned by signed bytes).
std::string_view isa_name(Isa isa);

// Throws std::invalid_argument, one line, for a name that is none of the above.
Isa parse_isa(std::string_view name);

// Those that the CPU and the operating system support and the core was built with, the best first.
const std::vector<Isa>& supported_isas();

}  // namespace headrace
