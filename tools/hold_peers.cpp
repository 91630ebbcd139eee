// Preloaded beside a library in which every `cpuid` was replaced by 0F 0A, which no CPU knows (hold_peers.py): answers
// in its place, without what HEADRACE_HOLD says is not there. So a program finds the kernels it would run on an older
// CPU.
#include <cpuid.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {

constexpr unsigned bits(std::initializer_list<int> which) {
    unsigned mask = 0;
    for (int bit : which) mask |= 1u << bit;
    return mask;
}

// AVX-512 in all its parts, AMX and AVX10, as leaves 7, 13 and 36 have them.
constexpr unsigned kEbx7 = bits({16, 17, 21, 26, 27, 28, 30, 31}), kEcx7 = bits({1, 6, 11, 12, 14});
constexpr unsigned kEdx7 = bits({2, 3, 8, 22, 23, 24, 25}), kEax71 = bits({5, 21}), kEdx71 = bits({8, 19});
constexpr unsigned kState = bits({5, 6, 7, 17, 18});
// AVX with VNNI, and what came after it.
constexpr unsigned kVnni = bits({4, 23}), kEdx71Vnni = bits({4, 5, 10});

bool holds_vnni = true;

void answer(unsigned leaf, unsigned sub, unsigned* a, unsigned* b, unsigned* c, unsigned* d) {
    __cpuid_count(leaf, sub, *a, *b, *c, *d);
    if (leaf == 7 && sub == 0) *b &= ~kEbx7, *c &= ~kEcx7, *d &= ~kEdx7;
    if (leaf == 7 && sub == 1)
        *a &= ~(kEax71 | (holds_vnni ? kVnni : 0)), *d &= ~(kEdx71 | (holds_vnni ? kEdx71Vnni : 0));
    if (leaf == 13 && sub == 0) *a &= ~kState;
    if (leaf == 0x24) *a = *b = *c = *d = 0;
}

void on_illegal(int, siginfo_t*, void* context) {
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const auto* at = reinterpret_cast<const unsigned char*>(registers[REG_RIP]);
    if (at[0] != 0x0F || at[1] != 0x0A) {
        signal(SIGILL, SIG_DFL);  // somebody else's: it dies of it as it would have
        return;
    }
    unsigned a, b, c, d;
    answer(unsigned(registers[REG_RAX]), unsigned(registers[REG_RCX]), &a, &b, &c, &d);
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) void begin() {
    const char* isa = std::getenv("HEADRACE_HOLD");
    holds_vnni = !isa || std::strcmp(isa, "avxvnni") != 0;
    struct sigaction action = {};
    action.sa_sigaction = on_illegal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, nullptr);
}

}  // namespace
