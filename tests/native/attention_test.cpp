// Tests of attention and the KV pool, also run under the sanitizers. Random feeds, draft trees, chunks and common
// prefixes on every instruction set and K/V type, on several threads. Rows must have the same bits as in one feed and
// alone.
#include "attention/attention.h"

#include <algorithm>
#include <numeric>

#include "bits.h"
#include "soft_tiles.h"
#include "system/threadpool.h"

using namespace headrace;
using namespace headrace::test;

namespace {

struct Layer {
    int heads, kv_heads, dim, window;
    float softcap;
    int most = -1;  // DistanceBias::most; below 0: no bias
    int width() const { return (heads + 2 * kv_heads) * dim; }
};

struct Fed {
    int start, known;
    std::vector<int> parents;
    std::vector<float> rows;
};

void run_threads(ThreadPool& threads, AttentionStep& step, AttentionLayout& layout, const AttentionTask& task) {
    const size_t floats = step.scratch_floats(task.heads / task.kv.heads);
    std::atomic<int> next{0};
    threads.run([&](int thread) {
        auto* scratch = static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64));
        if (!layout.fused()) {
            step.append(task, thread, scratch);
            threads.barrier(thread);
        }
        step.attend(layout, task, next, scratch);
        std::free(scratch);
    });
}

// One sequence in one pool, fed step by step.
class Runner {
public:
    Runner(const Kernels& kernels, KVType type, const Layer& layer, int tokens, ThreadPool& threads, unsigned seed)
        : layer_(layer),
          threads_(threads),
          pool_(type, 1, tokens / 16 + 3, 16, layer.kv_heads, layer.dim),
          step_(kernels, pool_, threads.size()),
          table_(static_cast<size_t>(tokens / 16 + 2)) {
        if (layer.most >= 0) {
            const size_t distances = 2 * static_cast<size_t>(layer.most) + 1, heads = static_cast<size_t>(layer.heads);
            std::vector<float> values(heads * distances);
            for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i * 7 % 13) * 0.25f;
            bias_ = bias_lines(values.data(), heads, distances);
        }
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
        AttentionLayout& layout = step_.layout({layer_.heads, layer_.window, true, false, !bias_.values.empty()});
        std::vector<float> out(static_cast<size_t>(n * layer_.heads * layer_.dim), NAN);
        AttentionTask task{};
        step_.prepare(layout, 0, task);
        task.q = fed.rows.data();
        task.k = task.q + layer_.heads * layer_.dim;
        task.v = task.k + layer_.kv_heads * layer_.dim;
        task.stride = layer_.width();
        task.scale = 1.0f / std::sqrt(static_cast<float>(layer_.dim));
        task.softcap = layer_.softcap;
        if (!bias_.values.empty()) task.bias = {bias_.values.data(), bias_.most};
        task.out = out.data();
        task.out_stride = layer_.heads * layer_.dim;
        run_threads(threads_, step_, layout, task);
        return out;
    }

    KVPool& pool() { return pool_; }
    const std::vector<int32_t>& table() const { return table_; }

private:
    const Layer layer_;
    ThreadPool& threads_;
    KVPool pool_;
    AttentionStep step_;
    std::vector<int32_t> table_;
    BiasLines bias_;
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
    // A tree in which nodes 1, 3, 5 ... are the correct path, each with a wrong sibling before it.
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

// Cross-attention: sources are stored by append jobs alone; rows read them together and each alone.
void check_sources(const Kernels& kernels, KVType type, ThreadPool& threads, std::mt19937& rng) {
    constexpr int kHeads = 4, kKvHeads = 2, kDim = 32, kWidth = kKvHeads * kDim, kBlocks = 48, kTable = 40;
    KVPool pool(type, 1, kBlocks, 16, kKvHeads, kDim);
    AttentionStep step(kernels, pool, threads.size());
    const std::vector<int32_t> lengths{5, 600, 17, 600};  // the last feed reads the source of the second
    std::vector<int32_t> tables(lengths.size() * kTable, -1);
    for (size_t s = 0, next = 0; s + 1 < lengths.size(); ++s) {
        for (int i = 0; i < (lengths[s] + 15) / 16; ++i)
            tables[s * kTable + static_cast<size_t>(i)] = static_cast<int32_t>(kBlocks - ++next);
    }
    std::copy_n(tables.begin() + kTable, kTable, tables.begin() + 3 * kTable);
    std::normal_distribution<float> normal;
    const auto rows = [&](int n, int width) {
        std::vector<float> x(static_cast<size_t>(n * width));
        for (float& value : x) value = normal(rng);
        return x;
    };
    for (size_t s = 0; s + 1 < lengths.size(); ++s) {
        std::vector<int32_t> positions(static_cast<size_t>(lengths[s]));
        std::iota(positions.begin(), positions.end(), 0);
        const std::vector<int32_t> starts{0, lengths[s]}, start{0}, known{lengths[s]};
        step.begin({positions, {}, starts, start, known, std::span(tables).subspan(s * kTable, kTable), kTable});
        step.list_appends();
        const std::vector<float> x = rows(lengths[s], 2 * kWidth);
        AttentionTask task{};
        step.prepare(0, task);
        task.k = x.data(), task.v = task.k + kWidth, task.stride = 2 * kWidth;
        threads.run([&](int thread) {
            auto* scratch = static_cast<float*>(std::aligned_alloc(64, (step.scratch_floats() * 4 + 63) / 64 * 64));
            step.append(task, thread, scratch);
            std::free(scratch);
        });
    }
    const auto read = [&](std::vector<size_t> feeds, const float* q) {
        const auto count = static_cast<int32_t>(feeds.size());
        std::vector<int32_t> starts, own(feeds.size(), 0), start(feeds.size(), 7), known(feeds.size(), 2), sources,
            source_tables;
        std::vector<int32_t> positions(2 * feeds.size(), 7);
        for (int32_t i = 0; i <= count; ++i) starts.push_back(2 * i);
        for (const size_t f : feeds) {
            sources.push_back(lengths[f]);
            source_tables.insert(source_tables.end(), tables.begin() + static_cast<long>(f * kTable),
                                 tables.begin() + static_cast<long>((f + 1) * kTable));
        }
        StepFeeds made{positions, {}, starts, start, known, own, 1};
        made.sources = sources, made.source_tables = source_tables, made.source_width = kTable;
        step.begin(made);
        AttentionLayout& layout = step.layout({kHeads, 0, true, true});
        std::vector<float> out(2 * feeds.size() * kHeads * kDim, NAN);
        AttentionTask task{};
        step.prepare(layout, 0, task);
        task.q = q, task.stride = kHeads * kDim, task.scale = 0.2f;
        task.out = out.data(), task.out_stride = kHeads * kDim;
        run_threads(threads, step, layout, task);
        return out;
    };
    const std::vector<float> q = rows(8, kHeads * kDim), all = read({0, 1, 2, 3}, q.data());
    for (size_t f = 0; f < lengths.size(); ++f) {
        const size_t at = f * 2 * kHeads * kDim;
        equal(read({f}, q.data() + at), all.data() + at, "a row reads another source beside others");
    }
    equal(read({1}, q.data() + 6 * kHeads * kDim), all.data() + 6 * kHeads * kDim, "a source read twice differs");
    const std::vector<int32_t> zero{0}, one{1}, both{0, 1};
    step.begin({zero, {}, both, zero, one, zero, 1});
    if (!throws([&] { step.layout({kHeads, 0, true, true}); })) fail("rows read a source that is not there");
}

// Sequences in one pool that start with the same blocks.
class Family {
public:
    static constexpr int kWidth = 80;  // blocks per table

    Family(const Kernels& kernels, KVType type, const Layer& layer, ThreadPool& threads, std::mt19937& rng)
        : layer_(layer),
          threads_(threads),
          rng_(rng),
          pool_(type, 1, 1500, 16, layer.kv_heads, layer.dim),
          step_(kernels, pool_, threads.size()) {}

    // Adds a sequence that starts with `tokens` tokens of sequence `parent` (a multiple of 16; parent -1: none) and has
    // `more` own tokens.
    int add(int parent, int tokens, int more) {
        std::vector<int32_t> table(kWidth, 0);
        const int shared = parent < 0 ? 0 : tokens / 16;
        for (int i = 0; i < shared; ++i)
            table[static_cast<size_t>(i)] = tables_[static_cast<size_t>(parent)][static_cast<size_t>(i)];
        for (int i = shared; i < (16 * shared + more + 15) / 16 + 1; ++i) table[static_cast<size_t>(i)] = next_++;
        tables_.push_back(table), lengths_.push_back(16 * shared + more);
        const int one = static_cast<int>(tables_.size()) - 1;
        if (more) run({one}, {more}, {16 * shared});
        return one;
    }

    // Adds a sequence with the blocks of `other`, except for one own block.
    int add_changed(int other, int block) {
        tables_.push_back(tables_[static_cast<size_t>(other)]),
            lengths_.push_back(lengths_[static_cast<size_t>(other)]);
        tables_.back()[static_cast<size_t>(block)] = next_++;
        const int one = static_cast<int>(tables_.size()) - 1, start = 16 * block;
        if (start < lengths_.back()) run({one}, {16}, {start});
        return one;
    }

    // Feeds the next rows of the members in one step and each alone: same bits, and fewer bytes read if `shares`.
    void check(const std::vector<int>& members, const std::vector<int>& rows, bool shares) {
        std::vector<int> starts;
        for (const int one : members) starts.push_back(lengths_[static_cast<size_t>(one)]);
        const auto [got, read] = run(members, rows, starts);
        const std::vector<float> x = x_;
        double alone = 0;
        size_t at = 0;
        for (size_t m = 0; m < members.size(); ++m) {
            given_ = x.data() + at / static_cast<size_t>(out_width()) * static_cast<size_t>(layer_.width());
            const auto [wanted, bytes] = run({members[m]}, {rows[m]}, {starts[m]});
            given_ = nullptr;
            equal(wanted, got.data() + at, "a row has other bits beside those it shares blocks with");
            at += wanted.size(), alone += bytes;
        }
        if (shares != (read < alone)) fail(shares ? "nothing was read together" : "what differs was read together");
    }

private:
    int out_width() const { return layer_.heads * layer_.dim; }

    std::pair<std::vector<float>, double> run(const std::vector<int>& members, const std::vector<int>& rows,
                                              const std::vector<int>& starts) {
        std::vector<int32_t> row_start{0}, kv_start, known, tables, positions;
        std::vector<uint64_t> masks;
        for (size_t m = 0; m < members.size(); ++m) {
            row_start.push_back(row_start.back() + rows[m]);
            kv_start.push_back(starts[m]), known.push_back(rows[m]);
            for (int i = 0; i < rows[m]; ++i) positions.push_back(starts[m] + i);
            const std::vector<int32_t>& table = tables_[static_cast<size_t>(members[m])];
            tables.insert(tables.end(), table.begin(), table.end());
        }
        x_.resize(positions.size() * static_cast<size_t>(layer_.width()));
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < x_.size(); ++i) x_[i] = given_ ? given_[i] : normal(rng_);
        step_.begin({positions, masks, row_start, kv_start, known, tables, kWidth});
        AttentionLayout& layout = step_.layout({layer_.heads, layer_.window, true});
        std::vector<float> out(positions.size() * static_cast<size_t>(out_width()), NAN);
        AttentionTask task{};
        step_.prepare(layout, 0, task);
        task.q = x_.data();
        task.k = task.q + out_width();
        task.v = task.k + layer_.kv_heads * layer_.dim;
        task.stride = layer_.width();
        task.scale = 1.0f / std::sqrt(static_cast<float>(layer_.dim));
        task.softcap = layer_.softcap;
        task.out = out.data();
        task.out_stride = out_width();
        run_threads(threads_, step_, layout, task);
        return {out, layout.touches().first};
    }

    const Layer layer_;
    ThreadPool& threads_;
    std::mt19937& rng_;
    KVPool pool_;
    AttentionStep step_;
    std::vector<std::vector<int32_t>> tables_;
    std::vector<int> lengths_;
    std::vector<float> x_;
    const float* given_ = nullptr;  // rows to use again
    int32_t next_ = 0;              // next free block
};

void check_families(const Kernels& kernels, KVType type, const Layer& layer, ThreadPool& threads, std::mt19937& rng) {
    Family family(kernels, type, layer, threads, rng);
    const int root = family.add(-1, 0, 800);
    const int stranger = family.add(-1, 0, 700);
    std::vector<int> all{root, stranger}, rows{1, 1};
    for (int child = 0; child < 20; ++child) {  // some children share more blocks with each other than with the rest
        const int one = family.add(root, 16 * (33 + static_cast<int>(rng() % 10)), 1 + static_cast<int>(rng() % 40));
        const int other = child % 3 ? one : family.add(one, 528, 300);
        all.push_back(other), rows.push_back(1 + static_cast<int>(rng() % 3));
    }
    const int nephew = family.add(root, 544, 400), niece = family.add(nephew, 800, 5);
    for (const int one : {nephew, niece}) all.push_back(one), rows.push_back(2);
    std::vector<size_t> order(all.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    std::vector<int> members, counts;
    for (const size_t at : order) members.push_back(all[at]), counts.push_back(rows[at]);
    family.check(members, counts, layer.window == 0);
    // Control: different blocks in both splits, so neither split may be read together.
    const int left = family.add(-1, 0, 592);
    const int right = family.add_changed(family.add_changed(family.add_changed(left, 5), 25), 37);
    family.check({left, right}, {1, 1}, false);
}

// Name of the reference hash: attention has the same bits on all instruction sets with fma. Exceptions: AVX-512 with
// bfloat16 products, which add weights in another order and treat subnormals as 0, plain C++ on x86-64, which has no
// fma, and bfloat16 on AMX, which has an order of sums of its own.
std::string rounding_of(Isa isa, KVType type) {
    if (isa == Isa::kAmxAll && type == KVType::kBf16) return "attention-amx";
#ifndef __aarch64__
    if (isa == Isa::kPlain) return "attention-twice";
#endif
    return isa == Isa::kAvx512 || is_amx(isa) ? "attention-avx512" : "attention-once";
}

// Hash of the results of 300 rows fed in two steps.
uint64_t fingerprint(const Kernels& kernels, KVType type, const Layer& layer, ThreadPool& threads) {
    std::mt19937 rng(11);
    Runner runner(kernels, type, layer, 300, threads, 3);
    Hash hash;
    for (const auto& [start, count] : {std::pair{0, 260}, std::pair{260, 40}}) {
        const Fed fed{start, count, {}, even_floats(rng, static_cast<size_t>(count * layer.width()))};
        hash.add(runner.run(fed));
    }
    return hash.value();
}

// Largest difference between the results of two tables of kernels for the same rows.
float distance(const Kernels& a, const Kernels& b, const Layer& layer, int other_window, ThreadPool& threads) {
    std::mt19937 rng(13);
    const Fed fed{0, 300, {}, even_floats(rng, static_cast<size_t>(300 * layer.width()))};
    Layer second = layer;
    second.window = other_window;
    const std::vector<float> one = Runner(a, KVType::kBf16, layer, 300, threads, 3).run(fed),
                             two = Runner(b, KVType::kBf16, second, 300, threads, 3).run(fed);
    float most = 0.0f;
    for (size_t i = 0; i < one.size(); ++i) most = std::max(most, std::abs(one[i] - two[i]));
    return most;
}

// AMX adds in another order: its results are near those of AVX-512, not equal. Control: a window of 50 is not near.
void check_amx(ThreadPool& threads) {
    for (const Kernels& kernels : tested_kernels()) {
        if (kernels.isa != Isa::kAmxAll) continue;
        for (const int dim : {16, 64, 80}) {
            const Layer layer{4, 2, dim, 0, 0.0f};
            const float near = distance(kernels, kernels_for(Isa::kAvx512), layer, 0, threads);
            require(near > 0.0f && near < 0.05f, "attention on AMX is not near that on AVX-512");
            require(distance(kernels, kernels_for(Isa::kAvx512), layer, 50, threads) > 0.5f,
                    "the control: a window is near, too");
        }
    }
}

void check_bits(const Layer& layer, ThreadPool& threads) {
    Bits bits;
    constexpr KVType kTypes[] = {KVType::kBf16, KVType::kInt8, KVType::kF32, KVType::kInt4};
    for (const Kernels& kernels : tested_kernels()) {
        for (const KVType type : kTypes) {
            const uint64_t hash = fingerprint(kernels, type, layer, threads);
            bits.compare(rounding_of(kernels.isa, type), static_cast<int>(type), kernels.isa, hash);
        }
    }
    bits.finish();
    const Layer other{layer.heads, layer.kv_heads, layer.dim, 50, layer.softcap};
    const uint64_t windowed = fingerprint(kernels(), KVType::kF32, other, threads);
    require(!bits.holds(rounding_of(kernels().isa, KVType::kF32), static_cast<int>(KVType::kF32), windowed),
            "the control: a window has the same bits");
}

}  // namespace

int main() {
    std::mt19937 rng(7);
    ThreadPool threads(3);
    check_bits({3, 1, 64, 0, 0.0f}, threads);
    check_amx(threads);
    const Layer layers[] = {{3, 1, 64, 0, 0.0f}, {4, 4, 8, 50, 0.0f}, {4, 2, 80, 0, 5.0f}, {4, 2, 16, 0, 0.0f, 20}};
    for (const Kernels& kernels : tested_kernels()) {
        for (const KVType type : {KVType::kBf16, KVType::kInt8, KVType::kInt4, KVType::kF32}) {
            if (type != KVType::kBf16 && kernels.isa == Isa::kAmxAll) continue;  // the kernels of avx512
            for (const Layer& layer : layers) check(kernels, type, layer, threads, rng);
            check_families(kernels, type, layers[0], threads, rng);
            check_sources(kernels, type, threads, rng);
        }
        check_families(kernels, KVType::kBf16, layers[1], threads, rng);
    }
    std::puts("attention: ok");
    return 0;
}
