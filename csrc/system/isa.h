// Instruction sets that the core is built for, and detection of those that this CPU runs.
#pragma once

#include <string_view>
#include <vector>

namespace headrace {

enum class Isa { kPlain, kAvx2, kAvxVnni, kAvx512Vnni, kAvx512, kAmx, kNeon, kI8mm };

// "plain", "avx2", "avxvnni" (AVX2 with VNNI), "avx512vnni" (AVX-512 with VNNI), "avx512" (with VNNI and BF16) or "amx"
// (avx512 whose bfloat16 linear layers use AMX); on Arm "neon" (with the dot product of signed bytes) or "i8mm" (with
// the dot product of unsigned and signed bytes).
std::string_view isa_name(Isa isa);

// Throws std::invalid_argument for an unknown name.
Isa parse_isa(std::string_view name);

// Instruction sets that the CPU and the operating system support and the core is built for, the best first.
const std::vector<Isa>& supported_isas();

}  // namespace headrace
