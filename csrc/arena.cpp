#include "arena.h"

#include <sys/mman.h>

#include <new>

namespace headrace {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLine = 64;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

Arena::Arena(size_t block_bytes) : block_bytes_(round_up(block_bytes ? block_bytes : 1, kHugePage)) {}

Arena::~Arena() {
    for (const Block& block : blocks_) munmap(block.mapping, block.mapped);
}

uint8_t* Arena::allocate(size_t bytes) {
    const std::lock_guard<std::mutex> guard(lock_);
    bytes = round_up(bytes, kLine);
    Block* block = nullptr;
    for (Block& open : blocks_) {
        if (open.bytes - open.used >= bytes) block = &open;
    }
    if (!block) block = &add_block(bytes > block_bytes_ ? round_up(bytes, kHugePage) : block_bytes_);
    uint8_t* memory = block->base + block->used;
    block->used += bytes;
    used_ += bytes;
    return memory;
}

Arena::Block& Arena::add_block(size_t bytes) {
    const size_t mapped = bytes + kHugePage;  // room to begin on a 2 MB boundary
    void* mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    auto* base = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(mapping), kHugePage));
    madvise(base, bytes, MADV_HUGEPAGE);  // a hint: where huge pages are off, small ones serve
    blocks_.push_back({base, bytes, 0, mapping, mapped});
    return blocks_.back();
}

}  // namespace headrace
