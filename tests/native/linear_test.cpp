// Tests of packing and linear layers, also run under the sanitizers. All kinds of weights on every instruction set,
// with sizes that do not fill a tile or a unit, in buffers that end with the data, and with a fetch list. All results
// must have equal bits and agree with the sum in double.
#include "linear/linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "bits.h"
#include "pack/pack.h"
#include "rows.h"
#include "soft_tiles.h"

using namespace headrace;
using namespace headrace::test;

namespace {

constexpr int kMost = 33;  // most rows

struct Layer {
    Layer(const Case& which, const std::vector<uint8_t>& rows, const std::vector<float>& bias, const Kernels& kernels,
          Arena& arena, ThreadPool& pool)
        : request{{rows.data(), source_row_bytes(which.kind, which.k), which.kind, nullptr},
                  packed_kind(which.kind),
                  which.n,
                  which.k,
                  bias.data()},
          plain({pack_tensor(request, kernels, arena, pool)}, false),
          gated(pair(kernels, arena, pool), true) {}

    std::vector<PackedTensor> pair(const Kernels& kernels, Arena& arena, ThreadPool& pool) const {
        const auto [gate, up] = pack_pair(request, request, kernels, arena, pool);
        return {gate, up};
    }

    const PackRequest request;
    const PackedLinear plain, gated;
};

// The results of one layer for some rows, with all epilogues.
struct Results {
    std::vector<float> stored, added, gated, logits, maxima;
    std::vector<uint8_t> a8;
    std::vector<uint16_t> bf16;

    bool operator==(const Results& other) const {
        return same_bits(stored, other.stored) && same_bits(added, other.added) && same_bits(gated, other.gated) &&
               same_bits(logits, other.logits) && same_bits(maxima, other.maxima) && same_bits(a8, other.a8) &&
               same_bits(bf16, other.bf16);
    }

    // The first `rows` rows.
    Results first(int rows, int of) const {
        const auto cut = [&](const auto& all) {
            return std::decay_t<decltype(all)>(all.begin(),
                                               all.begin() + static_cast<ptrdiff_t>(all.size() / of * rows));
        };
        return {cut(stored), cut(added), cut(gated), cut(logits), cut(maxima), cut(a8), cut(bf16)};
    }
};

std::atomic<int> pages_fetched{0};

// Runs a layer on all threads, each with a fetch list of two pages. Prefetching must not change a result.
void run(LinearWork work, ThreadPool& pool) {
    const Exact<uint8_t> pages(6 * 4096);
    const int32_t order[6] = {3, 0, 5, 1, 4, 2};
    std::atomic<int> next{0};
    pool.run([&](int thread) {
        const Exact<uint8_t> scratch(kLinearScratchBytes);
        FetchList list{pages.data(), order, 4096, 6, pool.size(), thread, 0};
        LinearWork own = work;
        own.fetch = &list;
        run_linear(own, thread, next, scratch.data());
        require(list.at % pool.size() == thread && list.offset >= 0 && list.offset < 4096, "a fetch goes astray");
        pages_fetched += (list.at - thread) / pool.size();
    });
}

// Only the first and the last unit of a head: they have the results of the full head, and the others are not written.
void some_units(LinearWork work, const std::vector<float>& logits, const std::vector<float>& maxima, ThreadPool& pool) {
    const int n = work.linear->n(), units = (n + 63) / 64;
    std::vector<float> part(logits.size(), -7.0f), tops(maxima.size(), -7.0f);
    const int32_t wanted[2] = {0, units - 1};
    work.units = wanted;
    work.epilogue.out = part.data(), work.epilogue.block_max = tops.data();
    run(work, pool);
    const auto asked = [&](size_t unit) { return unit == 0 || unit == static_cast<size_t>(units) - 1; };
    for (size_t i = 0; i < part.size(); ++i) {
        require(part[i] == (asked(i % static_cast<size_t>(n) / 64) ? logits[i] : -7.0f),
                "a unit is not as it should be");
    }
    for (size_t i = 0; i < tops.size(); ++i) {
        require(tops[i] == (asked(i % static_cast<size_t>(units)) ? maxima[i] : -7.0f), "nor is its maximum");
    }
}

Results results(const Layer& layer, Rounding rounding, const float* x, int m, int direct_rows, const Kernels& kernels,
                ThreadPool& pool) {
    const int n = layer.plain.n(), k = layer.plain.k(), tiles = tiles_of(k), out_tiles = tiles_of(n),
              units = (n + 63) / 64;
    const bool bf16 = layer.plain.bf16();
    const size_t rows = static_cast<size_t>(m);
    const Exact<A8Block> blocks(bf16 ? 0 : rows * static_cast<size_t>(tiles)),
        made(rows * static_cast<size_t>(out_tiles));
    const Exact<uint16_t> halves(bf16 ? rows * static_cast<size_t>(tiles) * 64 : 0),
        narrow(rows * static_cast<size_t>(out_tiles) * 64);
    LinearWork work{&kernels, &layer.plain, {}, {}, m, pool.size(), {}, direct_rows};
    if (bf16) {
        work.bf16 = {halves.data(), tiles * 64};
        kernels.quantize->to_bf16(x, k, 0, m, k, {}, nullptr, work.bf16);
    } else {
        work.a8 = {blocks.data(), tiles, rounding};
        kernels.quantize->to_a8(x, k, 0, m, k, {}, nullptr, work.a8);
    }
    const size_t floats = rows * static_cast<size_t>(n);
    Results got{std::vector<float>(floats),
                std::vector<float>(floats, 1.0f),
                std::vector<float>(floats),
                std::vector<float>(floats),
                std::vector<float>(rows * static_cast<size_t>(units)),
                {},
                {}};
    work.epilogue = {};
    work.epilogue.stride = n;
    work.epilogue.kind = EpilogueKind::kStore, work.epilogue.out = got.stored.data();
    run(work, pool);
    work.epilogue.kind = EpilogueKind::kAdd, work.epilogue.out = got.added.data();
    run(work, pool);
    work.epilogue.kind = EpilogueKind::kLogits, work.epilogue.out = got.logits.data();
    work.epilogue.scale = 0.5f, work.epilogue.softcap = 20.0f;
    work.epilogue.block_max = got.maxima.data(), work.epilogue.max_stride = units;
    run(work, pool);
    if (units > 2) some_units(work, got.logits, got.maxima, pool);
    work.linear = &layer.gated;
    work.epilogue.kind = EpilogueKind::kGated, work.epilogue.out = got.gated.data();
    work.epilogue.a8 = {made.data(), out_tiles}, work.epilogue.bf16 = {narrow.data(), out_tiles * 64};
    run(work, pool);
    const auto* bytes = reinterpret_cast<const uint8_t*>(made.data());
    got.a8.assign(bytes, bytes + rows * static_cast<size_t>(out_tiles) * sizeof(A8Block));
    got.bf16.assign(narrow.data(), narrow.data() + rows * static_cast<size_t>(out_tiles) * 64);
    return got;
}

// The layer's input after rounding to int8 or bfloat16.
std::vector<double> seen(const Layer& layer, Rounding rounding, const Kernels& kernels, const float* x, int m) {
    const int k = layer.plain.k(), tiles = tiles_of(k);
    const Exact<A8Block> blocks(static_cast<size_t>(m * tiles));
    const Exact<uint16_t> halves(static_cast<size_t>(m * tiles * 64));
    kernels.quantize->to_a8(x, k, 0, m, k, {}, nullptr, {blocks.data(), tiles, rounding});
    kernels.quantize->to_bf16(x, k, 0, m, k, {}, nullptr, {halves.data(), tiles * 64});
    std::vector<double> values;
    for (int i = 0; i < m; ++i) {
        for (int c = 0; c < k; ++c) {
            const A8Block& block = blocks.data()[i * tiles + c / 64];
            const uint32_t wide = uint32_t{halves.data()[i * tiles * 64 + c]} << 16;
            const double rounded = bits_of<float>(wide), whole = double{block.scale[c % 64 / 32]} * block.q[c % 64];
            values.push_back(layer.plain.bf16() ? rounded : whole);
        }
    }
    return values;
}

// Whether the results equal sums in double of the packed weights and the rounded inputs, up to the rounding of the sum:
// 4e-6 of the sum of absolute values. An average column of 321 is 3e-3 of it.
bool are_sums(const Layer& layer, const Kernels& kernels, const std::vector<double>& x, const std::vector<float>& bias,
              const Results& got) {
    const int n = layer.plain.n(), k = layer.plain.k(), m = static_cast<int>(got.stored.size()) / n;
    std::vector<float> row(static_cast<size_t>(k));
    for (int j = 0; j < n; ++j) {
        kernels.pack->unpack(layer.plain.parts().front(), j, row.data());
        for (int i = 0; i < m; ++i) {
            double sum = bias[static_cast<size_t>(j)], size = std::abs(sum);
            for (int c = 0; c < k; ++c) {
                const double product = x[static_cast<size_t>(i * k + c)] * row[static_cast<size_t>(c)];
                sum += product, size += std::abs(product);
            }
            if (!(std::abs(got.stored[static_cast<size_t>(i * n + j)] - sum) <= 4e-6 * size)) return false;
        }
    }
    return true;
}

std::atomic<int> columns_left_out{0};

// Checks the results against the sums. Control: without a column whose weight in row 0 has at least the average size,
// the check must fail.
void compare(const Layer& layer, Rounding rounding, const Kernels& kernels, const float* x,
             const std::vector<float>& bias, int m, const Results& got) {
    const std::vector<double> all = seen(layer, rounding, kernels, x, m);
    require(are_sums(layer, kernels, all, bias, got), "a product is not the sum");
    const int k = layer.plain.k();
    std::vector<float> row(static_cast<size_t>(k));
    kernels.pack->unpack(layer.plain.parts().front(), 0, row.data());
    double mean = 0;
    for (const float weight : row) mean += std::abs(weight) / static_cast<float>(k);
    for (int column = 0; column < k; column += 7) {
        if (std::abs(row[static_cast<size_t>(column)]) < std::max(mean, 1e-3))
            continue;  // tiny weights: only the bias would count
        std::vector<double> fewer = all;
        for (int i = 0; i < m; ++i) fewer[static_cast<size_t>(i * k + column)] = 0;
        require(!are_sums(layer, kernels, fewer, bias, got), "a column that is left out does not show");
        ++columns_left_out;
    }
    for (size_t i = 0; i < got.stored.size(); ++i)
        require(got.added[i] == 1.0f + got.stored[i], "adding is not storing");
}

void check(const Case& which, ThreadPool& pool, std::mt19937& rng) {
    const std::vector<uint8_t> rows = some_rows(which, rng);
    const std::vector<float> bias = normal_floats(rng, static_cast<size_t>(which.n));
    const std::vector<float> x = normal_floats(rng, static_cast<size_t>(kMost * which.k));
    std::unique_ptr<Results> same, amx;  // of AMX: its own order of sums in bfloat16
    for (const Kernels& kernels : tested_kernels()) {
        Arena arena(size_t{1} << 21);
        const Layer layer(which, rows, bias, kernels, arena, pool);
        std::unique_ptr<Results>& wanted = is_amx(kernels.isa) && layer.plain.bf16() ? amx : same;
        for (const int m : {kMost, 1, 2, 3, 6, 7, 16, 17, 32, 33}) {
            // The rows in their own memory, so that the sanitizers find a read past the last row.
            const std::vector<float> some(x.begin(), x.begin() + static_cast<ptrdiff_t>(m) * which.k);
            for (const int direct_rows : {1 << 30, -1}) {
                const Results got = results(layer, which.rounding, some.data(), m, direct_rows, kernels, pool);
                if (!wanted) {
                    compare(layer, which.rounding, kernels, some.data(), bias, m, got);
                    wanted = std::make_unique<Results>(got);
                }
                require(got == wanted->first(m, kMost), "a row has other bits");
            }
        }
    }
}

// Hash of all results of nine rows for one kind of weights.
uint64_t fingerprint(SourceKind source, const Kernels& kernels, ThreadPool& pool,
                     Rounding rounding = Rounding::kGroup) {
    std::mt19937 rng(static_cast<unsigned>(source));
    const Case which{source, 33, 768, rounding};
    const std::vector<uint8_t> rows = some_rows(which, rng);
    const std::vector<float> bias = even_floats(rng, 33), x = even_floats(rng, 9 * 768);
    Arena arena(size_t{1} << 21);
    const Layer layer(which, rows, bias, kernels, arena, pool);
    const Results got = results(layer, rounding, x.data(), 9, 1 << 30, kernels, pool);
    Hash hash;
    hash.add(got.stored).add(got.added).add(got.gated).add(got.logits).add(got.maxima).add(got.a8).add(got.bf16);
    return hash.value();
}

void check_bits(ThreadPool& pool) {
    Bits bits;
    for (int kind = 0; kind <= static_cast<int>(SourceKind::kLast); ++kind) {
        const SourceKind source = static_cast<SourceKind>(kind);
        for (const Kernels& kernels : tested_kernels()) {
            const bool amx = is_amx(kernels.isa) && packed_kind(source) == PackedKind::kBf16;
            bits.compare(amx ? "amx" : "linear", kind, kernels.isa, fingerprint(source, kernels, pool));
        }
    }
    const SourceKind rows = static_cast<SourceKind>(PackedKind::kC8);
    for (const Kernels& kernels : tested_kernels())
        bits.compare("by_row", 0, kernels.isa, fingerprint(rows, kernels, pool, Rounding::kToken));
    bits.finish();
    const uint64_t other = fingerprint(SourceKind::kF32, kernels(), pool);
    require(!bits.holds("linear", 0, other), "the control: another kind has the same bits");
}

float to_float(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

std::vector<float> bf16_floats(std::mt19937& rng, size_t count) {
    std::vector<float> values = normal_floats(rng, count);
    for (float& value : values) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof value);
        value = to_float(static_cast<uint16_t>(bits >> 16));
    }
    return values;
}

// A bfloat16 sum in AMX's order (Intel's description of TDPBF16PS), or, for the control, in one chain.
float amx_sum(const float* x, const float* w, int k, bool chain) {
    float total = 0.0f;
    for (int begin = 0; begin < k; begin += 32) {
        float even = chain ? total : 0.0f, odd = 0.0f;
        for (int i = begin; i < std::min(begin + 32, k); ++i) {
            float& sum = chain || i % 2 == 0 ? even : odd;
            sum = std::fma(x[i], w[i], sum);
        }
        total = chain ? even : total + (even + odd);
    }
    return total;
}

void check_amx_order(const Kernels& kernels, ThreadPool& pool) {
    constexpr int n = 130, k = 1000, m = 33;
    std::mt19937 rng(6);
    const std::vector<float> w = bf16_floats(rng, n * k), x = bf16_floats(rng, m * k);
    std::vector<uint8_t> rows(w.size() * sizeof(float));
    std::memcpy(rows.data(), w.data(), rows.size());
    const std::vector<float> bias(n, 0.0f);
    Arena arena(size_t{1} << 21);
    const Results got = results(Layer({SourceKind::kF32, n, k}, rows, bias, kernels, arena, pool), Rounding::kGroup,
                                x.data(), m, 1 << 30, kernels, pool);
    int others = 0;
    for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) {
            const float stored = got.stored[static_cast<size_t>(i * n + j)];
            require(stored == amx_sum(&x[static_cast<size_t>(i * k)], &w[static_cast<size_t>(j * k)], k, false),
                    "AMX sums in another order than the one described");
            others += stored != amx_sum(&x[static_cast<size_t>(i * k)], &w[static_cast<size_t>(j * k)], k, true);
        }
    }
    require(others > 0, "the control: one chain of sums has the same bits");
}

}  // namespace

int main() {
    std::mt19937 rng(5);
    ThreadPool pool(3);
    check_bits(pool);
    for (const Kernels& kernels : tested_kernels()) {
        if (is_amx(kernels.isa)) check_amx_order(kernels, pool);
    }
    for (int kind = 0; kind <= static_cast<int>(SourceKind::kLast); ++kind) {
        const SourceKind source = static_cast<SourceKind>(kind);
        const bool wide = throws([&] { source_row_bytes(source, 32); });   // blocks of 256
        const bool free = !throws([&] { source_row_bytes(source, 33); });  // any number of columns
        for (const int n : {1, 130}) check({source, n, wide ? 256 : free ? 97 : 96}, pool, rng);
        check({source, 33, wide ? 768 : free ? 321 : 352}, pool, rng);
    }
    const SourceKind rows = static_cast<SourceKind>(PackedKind::kC8);
    for (const int n : {1, 33, 130}) check({rows, n, 352, Rounding::kToken}, pool, rng);
    require(pages_fetched > 0, "nothing was fetched");
    require(columns_left_out > 100, "few columns were left out");
    std::puts("linear: ok");
    return 0;
}
