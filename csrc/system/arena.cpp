#include "system/arena.h"

#include <atomic>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "system/os.h"

namespace headrace {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLine = 64;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

bool PageSize::small() {
    const std::lock_guard<std::mutex> guard(lock_);
    if (trial_ != Trial::kNone || slow_ < kSlowPages) return small_;
    trial_ = Trial::kRunning;
    return true;
}

void PageSize::took(bool small, double seconds) {
    const std::lock_guard<std::mutex> guard(lock_);
    if (!small && seconds > kSlow) ++slow_, slow_seconds_ += seconds;
    if (!small || trial_ != Trial::kRunning) return;
    trial_ = Trial::kOver;
    small_ = seconds < 0.5 * slow_seconds_ / slow_;
}

Arena::Arena(size_t block_bytes, Pages pages)
    : block_bytes_(round_up(block_bytes ? block_bytes : 1, kHugePage)), pages_(pages) {}

Arena::Arena(size_t block_bytes, int file, bool filled)
    : block_bytes_(round_up(block_bytes ? block_bytes : 1, kHugePage)),
      pages_(Pages::kQuickest),
      file_(os::duplicate(file)),
      filled_(filled) {}

Arena::~Arena() {
    for (const Block& block : blocks_) os::release(block.mapping, block.mapped);
    if (in_file()) os::close(file_);
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

void Arena::provide(std::span<const uint8_t> part) {
    if (in_file()) return;  // the system reads pages of a file when they are first written
    each_page(part, [&](Block& block, size_t page) { provide_page(block, page); });
}

void Arena::provide(ThreadPool& pool, std::span<const std::span<uint8_t>> parts) {
    if (in_file()) return;
    std::vector<std::pair<Block*, size_t>> wanted;
    for (const std::span<uint8_t> part : parts) {
        each_page(part, [&](Block& block, size_t page) {
            if (block.pages[page].load(std::memory_order_acquire) != kThere) wanted.emplace_back(&block, page);
        });
    }
    if (wanted.empty()) return;
    std::atomic<size_t> next{0};
    const auto provide_pages = [&](int) noexcept {
        for (size_t at; (at = next.fetch_add(1)) < wanted.size();) provide_page(*wanted[at].first, wanted[at].second);
    };
    pool.run(provide_pages, ThreadPool::Crew::kAvailable);
}

template <class F>
void Arena::each_page(std::span<const uint8_t> part, F f) {
    for (Block& block : blocks_) {
        if (part.data() < block.base || part.data() >= block.base + block.bytes) continue;
        const auto first = static_cast<size_t>(part.data() - block.base);
        for (size_t page = first / kHugePage; page * kHugePage < first + part.size(); ++page) f(block, page);
    }
}

void Arena::provide_page(Block& block, size_t page) {
    std::atomic<Page>& state = block.pages[page];
    Page seen = kNew;
    if (!state.compare_exchange_strong(seen, kComing, std::memory_order_acquire)) {
        while (state.load(std::memory_order_acquire) != kThere) std::this_thread::yield();
        return;
    }
    uint8_t* memory = block.base + page * kHugePage;
    const bool small = pages_ == Pages::kQuickest && page_size_.small();
    if (small) os::prefer(os::Pages::kSmall, memory, kHugePage);
    const double before = os::thread_seconds();
    // If the system does not support it, it provides the pages when they are first written.
    if (os::provide(memory, kHugePage)) page_size_.took(small, os::thread_seconds() - before);
    state.store(kThere, std::memory_order_release);
}

void Arena::write_back() {
    os::write_back(file_);
    for (const Block& block : blocks_) os::drop(file_, block.begin, block.base, block.bytes);
}

void Arena::fetch(std::span<const uint8_t> part) const {
    os::fetch(file_, place_in_file(part), part.data(), part.size());
}

void Arena::drop(std::span<const uint8_t> part) const {
    os::drop(file_, place_in_file(part), part.data(), part.size());
}

size_t Arena::place_in_file(std::span<const uint8_t> part) const {
    for (const Block& block : blocks_) {
        if (part.data() >= block.base && part.data() < block.base + block.bytes)
            return block.begin + static_cast<size_t>(part.data() - block.base);
    }
    throw std::invalid_argument("the part is of another arena");
}

size_t Arena::resident(std::span<const uint8_t> part) const {
    if (!part.empty()) return os::resident(part.data(), part.size());
    size_t bytes = 0;
    for (const Block& block : blocks_) bytes += os::resident(block.base, block.bytes);
    return bytes;
}

Arena::Block& Arena::add_block(size_t bytes) {
    if (in_file()) {
        if (!filled_) os::extend_file(file_, file_bytes_, bytes);
        auto* base = static_cast<uint8_t*>(filled_ ? os::map_file_read_only(file_, file_bytes_, bytes)
                                                   : os::map_file(file_, file_bytes_, bytes));
        blocks_.push_back({base, bytes, 0, base, bytes, file_bytes_, nullptr});
        file_bytes_ += bytes;
        return blocks_.back();
    }
    const size_t mapped = bytes + kHugePage;  // space to align the base to 2 MB
    void* mapping = os::reserve(mapped);
    auto* base = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(mapping), kHugePage));
    os::prefer(os::Pages::kLarge, base, bytes);  // the system may still use small pages
    blocks_.push_back({base, bytes, 0, mapping, mapped, 0, std::make_unique<std::atomic<Page>[]>(bytes / kHugePage)});
    return blocks_.back();
}

}  // namespace headrace
