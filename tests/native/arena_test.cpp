// Tests of Arena and KVPool memory: the choice of the page size, and that `provide` keeps written data.
#include "system/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>

#include "attention/kv_pool.h"
#include "check.h"

using namespace headrace;
using namespace headrace::test;

namespace {

// Number of the next `pieces` pieces of 2 MB that use small pages, if 2 MB cost `huge` or `small` seconds.
int small_ones(PageSize& size, int pieces, double huge, double small) {
    int count = 0;
    for (int i = 0; i < pieces; ++i) {
        const bool is_small = size.small();
        size.took(is_small, is_small ? small : huge);
        count += is_small;
    }
    return count;
}

void page_sizes() {
    PageSize quick, slow, both_slow, late;
    require(small_ones(quick, 100, 0.2e-3, 0.7e-3) == 0, "small pages where those of 2 MB are quick");
    require(small_ones(slow, 100, 5e-3, 0.7e-3) == 96, "slow pages of 2 MB where small ones are quick");
    require(small_ones(both_slow, 100, 5e-3, 4e-3) == 1, "small pages that are no quicker are tried once");
    require(small_ones(late, 50, 0.2e-3, 0.7e-3) == 0 && small_ones(late, 50, 5e-3, 0.7e-3) == 46,
            "it does not learn late");
    // One thread runs the trial; 2 MB that another thread requested before the trial do not count.
    PageSize shared;
    small_ones(shared, 4, 5e-3, 0);
    require(shared.small() && !shared.small(), "two trials at once");
    shared.took(false, 5e-3);
    require(!shared.small(), "a trial was taken for over");
    shared.took(true, 1e-3);
    require(shared.small(), "a trial has no consequence");
}

void provided(int threads) {
    ThreadPool pool(threads);
    Arena arena(size_t{4} << 20);
    std::vector<std::pair<uint8_t*, size_t>> parts;
    std::mt19937 rng(3);
    for (int i = 0; i < 12; ++i) {
        const size_t bytes = static_cast<size_t>(1 + below(rng, i % 4 == 3 ? 5 << 20 : 3 << 19));
        uint8_t* memory = arena.allocate(bytes);
        // Every thread provides all of it: none may continue before it is complete or clear data of another thread.
        std::vector<std::atomic<int>> wrong(threads);
        pool.run([&](int thread) {
            arena.provide({memory, bytes});
            const size_t begin = bytes * thread / threads, end = bytes * (thread + 1) / threads;
            wrong[thread] = !std::all_of(memory + begin, memory + end, [](uint8_t x) { return x == 0; });
            std::fill(memory + begin, memory + end, static_cast<uint8_t>(i + 1));
        });
        for (const auto& thread : wrong) require(thread == 0, "new memory is not zero");
        parts.emplace_back(memory, bytes);
    }
    for (size_t i = 0; i < parts.size(); ++i) {
        const auto [memory, bytes] = parts[i];
        require(std::all_of(memory, memory + bytes, [&](uint8_t x) { return x == i + 1; }), "memory was changed");
    }
}

constexpr size_t kHugePage = size_t{2} << 20, kSmallPage = 4096;

bool resident(const uint8_t* at) {
    unsigned char flag = 0;
    auto* page = reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(at) / kSmallPage * kSmallPage);
    require(mincore(page, kSmallPage, &flag) == 0, "mincore");
    return flag & 1;
}

bool can_provide() {
    void* page = mmap(nullptr, kSmallPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    // MADV_POPULATE_WRITE, since Linux 5.14; qemu-user accepts it and does nothing.
    const bool can = madvise(page, kSmallPage, 23) == 0 && resident(static_cast<const uint8_t*>(page));
    munmap(page, kSmallPage);
    return can;
}

// `provide` provides exactly the pages of its part.
void provided_in_part(int threads) {
    ThreadPool pool(threads);
    Arena arena(8 * kHugePage);
    uint8_t* memory = arena.allocate(8 * kHugePage);
    const std::span<uint8_t> parts[] = {{memory + kHugePage + 5, 10}, {memory + 4 * kHugePage - 1, 2}};
    for (int time = 0; time < 2; ++time) {
        arena.provide(pool, parts);
        for (size_t page = 0; page < 8; ++page) {
            const bool wanted = page == 1 || page == 3 || page == 4;
            for (const size_t at : {page * kHugePage, (page + 1) * kHugePage - 1}) {
                require(resident(memory + at) == wanted, wanted ? "a page is missing" : "a page that nobody asked for");
            }
        }
    }
}

// `provide` provides the first blocks of every layer; providing more blocks keeps their data.
void blocks_provided(int threads) {
    constexpr int kLayers = 3, kBlocks = 4096;
    ThreadPool pool(threads);
    KVPool kv(KVType::kBf16, kLayers, kBlocks, 16, 2, 64);
    const size_t block = KVPool::block_bytes(KVType::kBf16, kLayers, 16, 2, 64) / kLayers;
    for (const int blocks : {1, 1000, 10, 2500}) {
        kv.provide(pool, blocks);
        for (int layer = 0; layer < kLayers; ++layer) {
            uint8_t* base = kv.layer(layer);
            require(resident(base) && resident(base + static_cast<size_t>(blocks) * block - 1),
                    "a block's page is missing");
            require(!resident(base + static_cast<size_t>(kBlocks - 512) * block), "pages of blocks that nobody uses");
            require(base[0] == (blocks == 1 ? 0 : layer + 1), "a block was changed");
            base[0] = static_cast<uint8_t>(layer + 1);
        }
    }
}

}  // namespace

int main() {
    page_sizes();
    for (const int threads : {1, 3}) {
        provided(threads);
        if (!can_provide()) continue;
        provided_in_part(threads);
        blocks_provided(threads);
    }
    std::puts("arena: ok");
    return 0;
}
