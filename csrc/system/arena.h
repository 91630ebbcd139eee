// Memory for packed weights and KV pools: large blocks on 2 MB pages, given back all at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "system/threadpool.h"

namespace headrace {

// Whether 2 MB of memory are to be asked for as one page or as small ones, learned from what they cost.
//
// A page of 2 MB takes 0.1 to 0.5 ms, mostly to clear it. In a virtual machine that has given its free memory back, the
// host must find all of it anew, for 5 ms or more, while small pages come from memory that is in pieces and still held.
// So once a few pages have been slow, small ones are tried once, and kept where they take less than half as long.
class PageSize {
public:
    bool small();                           // how the next 2 MB are to be asked for
    void took(bool small, double seconds);  // what they cost, in time of the CPU

private:
    enum class Trial { kNone, kRunning, kOver };

    static constexpr int kSlowPages = 4;
    static constexpr double kSlow = 1e-3;  // seconds

    std::mutex lock_;
    Trial trial_ = Trial::kNone;
    int slow_ = 0;
    double slow_seconds_ = 0;  // of all slow pages
    bool small_ = false;
};

class Arena {
public:
    // What is provided comes in pages of 2 MB, or in small ones where those are much quicker to get and a little slower
    // to use.
    enum class Pages { kQuickest, kLarge };

    // Blocks of `block_bytes` (rounded up to 2 MB) are mapped as they are needed; pages cost memory once written.
    explicit Arena(size_t block_bytes = size_t{256} << 20, Pages pages = Pages::kQuickest);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Zeroed, 64-byte aligned, valid as long as the arena. Throws std::bad_alloc.
    uint8_t* allocate(size_t bytes);

    // Has the system provide memory of the arena before it is written. Threads may ask for the same page: one of them
    // provides it and the others wait. (Two that meet in a new page would both clear one.) What was provided before
    // costs nothing. Not while another thread allocates.
    void provide(std::span<const uint8_t> part);
    // The same, on all threads of the pool. Throws ForkedError.
    void provide(ThreadPool& pool, std::span<const std::span<uint8_t>> parts);

    size_t used() const { return used_; }

private:
    enum Page : uint8_t { kNew, kComing, kThere };

    struct Block {
        uint8_t* base;
        size_t bytes;
        size_t used;
        void* mapping;  // what munmap takes: begins before `base`
        size_t mapped;
        std::unique_ptr<std::atomic<Page>[]> pages;  // of 2 MB
    };

    Block& add_block(size_t bytes);
    // f(block, page) for each page of a part.
    template <class F>
    void each_page(std::span<const uint8_t> part, F f);
    void provide_page(Block& block, size_t page);

    const size_t block_bytes_;
    const Pages pages_;
    std::mutex lock_;
    std::vector<Block> blocks_;
    size_t used_ = 0;
    PageSize page_size_;
};

}  // namespace headrace
