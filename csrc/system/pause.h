// Hint to the CPU that a thread polls.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

inline void pause_thread() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

}  // namespace headrace
