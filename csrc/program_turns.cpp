#include "program_turns.h"

#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

void Turn::pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void Turn::yield() { std::this_thread::yield(); }

void Turns::begin(int turns, int threads) {
    threads_ = threads, turns_ = turns;
    const size_t lines =
        static_cast<size_t>(turns + 1) * static_cast<size_t>(Turn::lines(threads));  // one to look ahead to
    if (lines_.size() < lines) lines_ = std::vector<Turn::Line>(lines);
    for (size_t i = 0; i < lines; ++i) lines_[i].count.store(0, std::memory_order_relaxed);
}

}  // namespace headrace
