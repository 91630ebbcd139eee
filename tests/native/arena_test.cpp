// The memory of packed weights, as a program: which pages are asked for, and that providing them changes nothing written.
#include "arena.h"

#include <algorithm>

#include "check.h"

using namespace headrace;
using namespace headrace::test;

namespace {

// How many of the next pieces of 2 MB are asked for as small pages, where they cost so many seconds.
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
    require(small_ones(late, 50, 0.2e-3, 0.7e-3) == 0 && small_ones(late, 50, 5e-3, 0.7e-3) == 46, "it does not learn late");
    // One thread tries; what the other has asked for meanwhile does not count as the trial.
    PageSize shared;
    small_ones(shared, 4, 5e-3, 0);
    require(shared.small() && !shared.small(), "two trials at once");
    shared.took(false, 5e-3);
    require(!shared.small(), "a trial was taken for over");
    shared.took(true, 1e-3);
    require(shared.small(), "a trial has no consequence");
}

void populated(int threads) {
    ThreadPool pool(threads);
    Arena arena(size_t{4} << 20);
    std::vector<std::pair<uint8_t*, size_t>> parts;
    std::mt19937 rng(3);
    for (int i = 0; i < 12; ++i) {
        const size_t bytes = static_cast<size_t>(1 + below(rng, i % 4 == 3 ? 5 << 20 : 3 << 19));
        uint8_t* memory = arena.allocate(bytes);
        arena.populate(pool);
        require(std::all_of(memory, memory + bytes, [](uint8_t x) { return x == 0; }), "new memory is not zero");
        std::fill(memory, memory + bytes, static_cast<uint8_t>(i + 1));
        parts.emplace_back(memory, bytes);
    }
    for (size_t i = 0; i < parts.size(); ++i) {
        const auto [memory, bytes] = parts[i];
        require(std::all_of(memory, memory + bytes, [&](uint8_t x) { return x == i + 1; }), "memory was changed");
    }
}

}  // namespace

int main() {
    page_sizes();
    for (const int threads : {1, 3}) populated(threads);
    std::puts("arena: ok");
    return 0;
}
