// Allocations that fail on demand. Only one source of a program may include it, because it replaces operator new.
#pragma once

#include <atomic>
#include <cstdlib>
#include <new>

namespace headrace::test {

// Number of allocations, on any thread, before one fails. Below 0: none fails.
inline std::atomic<int> left_to_allocate{-1};
inline std::atomic<int> failed{0};

inline void* allocate(size_t bytes) {
    int left = left_to_allocate.load();
    while (left >= 0 && !left_to_allocate.compare_exchange_weak(left, left - 1)) {
    }
    if (left == 0) {
        ++failed;
        throw std::bad_alloc();
    }
    void* memory = std::malloc(bytes ? bytes : 1);
    if (!memory) throw std::bad_alloc();
    return memory;
}

}  // namespace headrace::test

void* operator new(size_t bytes) { return headrace::test::allocate(bytes); }
void* operator new[](size_t bytes) { return headrace::test::allocate(bytes); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
    try {
        return headrace::test::allocate(bytes);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
