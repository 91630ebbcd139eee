// Memory for packed weights and KV pools: large blocks on 2 MB pages, all released together.
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

// Chooses between one 2 MB page and small pages, from their measured cost.
//
// A 2 MB page takes 0.1 to 0.5 ms, mostly to clear it. In a virtual machine that has returned its free memory, the host
// must allocate it again, which takes 5 ms or more; small pages come from fragmented memory that the machine still has.
// So after a few slow 2 MB pages, small pages are tried once, and used from then on if they take less than half the
// time.
class PageSize {
public:
    bool small();                           // whether the next 2 MB use small pages
    void took(bool small, double seconds);  // records the CPU time that 2 MB took

private:
    enum class Trial { kNone, kRunning, kOver };

    static constexpr int kSlowPages = 4;
    static constexpr double kSlow = 1e-3;  // seconds

    std::mutex lock_;
    Trial trial_ = Trial::kNone;
    int slow_ = 0;
    double slow_seconds_ = 0;  // total time of the slow pages
    bool small_ = false;
};

class Arena {
public:
    // Page size. kLarge: 2 MB. kQuickest: chosen by PageSize; small pages can be much faster to get, but are a little
    // slower to use.
    enum class Pages { kQuickest, kLarge };

    // Maps blocks of `block_bytes` bytes (rounded up to 2 MB) on demand. A page uses memory once it is written.
    explicit Arena(size_t block_bytes = size_t{256} << 20, Pages pages = Pages::kQuickest);
    // The same with the pages of an empty file, which the arena extends. `file` may be closed afterwards.
    // filled: of a file that another arena has filled by the same calls. The memory is read-only and has its contents.
    Arena(size_t block_bytes, int file, bool filled = false);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Zeroed, 64-byte aligned, valid as long as the arena. Throws std::bad_alloc.
    uint8_t* allocate(size_t bytes);

    // Makes the system provide memory of the arena before it is written. If several threads need the same page, one
    // provides it and the others wait; otherwise each of them would clear a page. Costs nothing for pages that were
    // provided before. Must not run while another thread allocates.
    void provide(std::span<const uint8_t> part);
    // The same on all threads of the pool. Throws ForkedError.
    void provide(ThreadPool& pool, std::span<const std::span<uint8_t>> parts);

    size_t used() const { return used_; }

    // Of an arena in a file: writes all changed pages to it and releases them. Throws std::runtime_error.
    void write_back();
    // Of an arena in a file: reads the pages of a part into memory, or releases them (os::fetch, os::drop).
    void fetch(std::span<const uint8_t> part) const;
    void drop(std::span<const uint8_t> part) const;
    // Bytes of a part that are in memory; of all blocks if it is empty.
    size_t resident(std::span<const uint8_t> part = {}) const;
    bool in_file() const { return file_ >= 0; }
    bool filled() const { return filled_; }

private:
    enum Page : uint8_t { kNew, kComing, kThere };

    struct Block {
        uint8_t* base;
        size_t bytes;
        size_t used;
        void* mapping;  // start of the mapping, at or before `base`
        size_t mapped;
        size_t begin;                                // place of `base` in the file
        std::unique_ptr<std::atomic<Page>[]> pages;  // state of each 2 MB page
    };

    Block& add_block(size_t bytes);
    size_t place_in_file(std::span<const uint8_t> part) const;
    // Calls f(block, page) for each 2 MB page of a part.
    template <class F>
    void each_page(std::span<const uint8_t> part, F f);
    void provide_page(Block& block, size_t page);

    const size_t block_bytes_;
    const Pages pages_;
    const int file_ = -1;  // -1: memory without a file
    const bool filled_ = false;
    size_t file_bytes_ = 0;  // size of the file
    std::mutex lock_;
    std::vector<Block> blocks_;
    size_t used_ = 0;
    PageSize page_size_;
};

}  // namespace headrace
