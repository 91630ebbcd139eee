// Attention and its pool, as a program: what the sanitizers run. Random feeds, draft trees and chunkings on every
// instruction set and kind of pool, on several threads; rows must have the bits they have when fed at once.
#include "attention.h"

#include <algorithm>
#include <numeric>

#include "check.h"
#include "threadpool.h"

using namespace headrace;
using namespace headrace::test;

namespace {

struct Layer {
    int heads, kv_heads, dim, window;
    float softcap;
    int width() const { return (heads + 2 * kv_heads) * dim; }
};

struct Fed {
    int start, known;
    std::vector<int> parents;
    std::vector<float> rows;
};

// One sequence over one pool, fed step by step.
class Runner {
public:
    Runner(const Kernels& kernels, KVType type, const Layer& layer, int tokens, ThreadPool& threads, unsigned seed)
        : layer_(layer),
          threads_(threads),
          pool_(type, 1, tokens / 16 + 3, 16, layer.kv_heads, layer.dim),
          step_(kernels, pool_, threads.size()),
          table_(static_cast<size_t>(tokens / 16 + 2)) {
        std::iota(table_.begin(), table_.end(), 0);
        std::shuffle(table_.begin(), table_.end(), std::mt19937(seed));
    }

    std::vector<float> run(const Fed& fed) {
        const int n = fed.known + static_cast<int>(fed.parents.size());
        std::vector<int32_t> positions(static_cast<size_t>(n));
        std::vector<uint64_t> masks(static_cast<size_t>(n));
        for (int i = 0; i < n; ++i) {
            const size_t at = static_cast<size_t>(i);
            const int node = i - fed.known;
            if (node >= 0) {
                const int parent = fed.parents[static_cast<size_t>(node)];
                masks[at] = (parent < 0 ? 0 : masks[static_cast<size_t>(fed.known + parent)]) | uint64_t{1} << node;
            }
            positions[at] = node < 0 ? fed.start + i : fed.start + fed.known - 1 + __builtin_popcountll(masks[at]);
        }
        const std::vector<int32_t> starts{0, n}, start{fed.start}, known{fed.known};
        step_.begin({positions, masks, starts, start, known, table_, static_cast<int>(table_.size())});
        AttentionLayout& layout = step_.layout({layer_.heads, layer_.window, true});
        std::vector<float> out(static_cast<size_t>(n * layer_.heads * layer_.dim), NAN);
        AttentionTask task{};
        step_.prepare(layout, 0, task);
        task.q = fed.rows.data();
        task.k = task.q + layer_.heads * layer_.dim;
        task.v = task.k + layer_.kv_heads * layer_.dim;
        task.stride = layer_.width();
        task.scale = 1.0f / std::sqrt(static_cast<float>(layer_.dim));
        task.softcap = layer_.softcap;
        task.out = out.data();
        task.out_stride = layer_.heads * layer_.dim;
        run_threads(layout, task);
        return out;
    }

    KVPool& pool() { return pool_; }
    const std::vector<int32_t>& table() const { return table_; }

private:
    void run_threads(AttentionLayout& layout, const AttentionTask& task) {
        const size_t floats = step_.scratch_floats(task.heads);
        std::atomic<int> next{0};
        threads_.run([&](int thread) {
            auto* scratch = static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64));
            if (!layout.fused()) {
                step_.append(layout, task, thread, scratch);
                threads_.barrier(thread);
            }
            step_.attend(layout, task, next, scratch);
            std::free(scratch);
        });
    }

    const Layer layer_;
    ThreadPool& threads_;
    KVPool pool_;
    AttentionStep step_;
    std::vector<int32_t> table_;
};

std::vector<float> rows_of(const std::vector<float>& all, int width, int first, int count) {
    return {all.begin() + static_cast<long>(first) * width, all.begin() + static_cast<long>(first + count) * width};
}

void equal(const std::vector<float>& a, const float* b, const char* what) {
    for (size_t i = 0; i < a.size(); ++i) {
        if (!std::isfinite(a[i])) fail("a result is not finite");
    }
    if (std::memcmp(a.data(), b, a.size() * sizeof(float)) != 0) fail(what);
}

void check(const Kernels& kernels, KVType type, const Layer& layer, ThreadPool& threads, std::mt19937& rng) {
    const int tokens = 300 + static_cast<int>(rng() % 40), width = layer.width(), out = layer.heads * layer.dim;
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(tokens * width));
    for (float& value : x) value = normal(rng);
    Runner whole(kernels, type, layer, tokens, threads, 1), chunks(kernels, type, layer, tokens, threads, rng());
    const std::vector<float> wanted = whole.run({0, tokens, {}, x});
    const int known = tokens - 12;
    for (int at = 0; at < known;) {
        const int count = std::min(known - at, 1 + static_cast<int>(rng() % 70));
        equal(chunks.run({at, count, {}, rows_of(x, width, at, count)}), wanted.data() + at * out,
              "a chunk has other bits");
        at += count;
    }
    // A tree in which nodes 1, 3, 5 ... are the true path, each with a wrong sibling before it.
    Fed draft{known, 0, {}, {}};
    for (int depth = 0; depth < 12; ++depth) {
        for (int wrong = 1; wrong >= 0; --wrong) {
            draft.parents.push_back(2 * depth - 1);
            std::vector<float> row = rows_of(x, width, known + depth, 1);
            for (float& value : row) value += static_cast<float>(wrong);
            draft.rows.insert(draft.rows.end(), row.begin(), row.end());
        }
    }
    const std::vector<float> got = chunks.run(draft);
    std::vector<std::pair<int32_t, int32_t>> moves;
    for (int depth = 0; depth < 12; ++depth) {
        equal(rows_of(got, out, 2 * depth + 1, 1), wanted.data() + (known + depth) * out, "a node has other bits");
        const auto place = [&](int index) { return chunks.table()[static_cast<size_t>(index / 16)] * 16 + index % 16; };
        moves.emplace_back(place(known + 2 * depth + 1), place(known + depth));
    }
    chunks.pool().move(moves);
    equal(chunks.run({tokens - 1, 1, {}, rows_of(x, width, tokens - 1, 1)}), wanted.data() + (tokens - 1) * out,
          "a moved path has other bits");
}

}  // namespace

int main() {
    std::mt19937 rng(7);
    ThreadPool threads(3);
    const Layer layers[] = {{3, 1, 64, 0, 0.0f}, {4, 4, 8, 50, 0.0f}, {4, 2, 80, 0, 5.0f}};
    for (const Isa isa : supported_isas()) {
        for (const KVType type : {KVType::kBf16, KVType::kInt8, KVType::kF32}) {
            for (const Layer& layer : layers) check(kernels_for(isa), type, layer, threads, rng);
        }
    }
    std::puts("attention: ok");
    return 0;
}
