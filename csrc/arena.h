// Memory for packed weights: large blocks on 2 MB pages, given back all at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace headrace {

class Arena {
public:
    // Blocks of `block_bytes` (rounded up to 2 MB) are mapped as they are needed; pages cost memory once written.
    explicit Arena(size_t block_bytes = size_t{256} << 20);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Zeroed, 64-byte aligned, valid as long as the arena. Throws std::bad_alloc.
    uint8_t* allocate(size_t bytes);

    size_t used() const { return used_; }

private:
    struct Block {
        uint8_t* base;
        size_t bytes;
        size_t used;
        void* mapping;  // what munmap takes: begins before `base`
        size_t mapped;
    };

    Block& add_block(size_t bytes);

    const size_t block_bytes_;
    std::mutex lock_;
    std::vector<Block> blocks_;
    size_t used_ = 0;
};

}  // namespace headrace
