// Instruction sets that the core is built for, and detection of those that this CPU runs.
#pragma once

#include <string_view>
#include <vector>

namespace headrace {

enum class Isa { kPlain, kAvx2, kAvxVnni, kAvx512Vnni, kAvx512, kAmx, kAmxAll, kNeon, kI8mm };

// "plain", "avx2", "avxvnni" (AVX2 with VNNI), "avx512vnni" (AVX-512 with VNNI), "avx512" (with VNNI and BF16), "amx"
// (avx512 whose bfloat16 linear layers use AMX) or "amxall" (amx whose C8 layers, panels and bfloat16 attention use
// AMX, too; not yet run on a CPU with AMX, so only HEADRACE_ISA chooses it); on Arm "neon" (with the dot product of
// signed bytes) or "i8mm" (with the dot product of unsigned and signed bytes).
std::string_view isa_name(Isa isa);

// Throws std::invalid_argument for an unknown name.
Isa parse_isa(std::string_view name);

// Instruction sets that the CPU and the operating system support and the core is built for, the best first. Without
// amxall.
const std::vector<Isa>& supported_isas();

// Whether kernels_for(isa) has a table: a supported instruction set, or amxall on a CPU that has AMX with INT8.
bool runs(Isa isa);

}  // namespace headrace
