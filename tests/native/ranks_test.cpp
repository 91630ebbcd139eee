// Tests of ranks, each a thread with its own pool, also run under the sanitizers: exchanges, linear layers that are cut
// along their columns, whole models on 2, 4 and 8 ranks, and lost ranks. All results must have the bits of one rank.
#include "ranks/ranks.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <thread>

#include "check.h"
#include "pack/pack.h"
#include "program/commands.h"
#include "program/program.h"
#include "rows.h"
#include "soft_tiles.h"

using namespace headrace;
using namespace headrace::test;
using namespace std::chrono_literals;

namespace {

constexpr auto kTimeout = 60s;

// Runs f(ranks) for every rank of a region, rank 0 on the caller. Returns the results by rank.
template <class F>
void on_ranks(const Region::Sizes& sizes, F f, std::chrono::milliseconds timeout = kTimeout) {
    const auto region = std::make_shared<Region>(sizes);
    std::vector<std::shared_ptr<Ranks>> ranks;
    for (int rank = 0; rank < sizes.world; ++rank) ranks.push_back(std::make_shared<Ranks>(region, rank, timeout));
    std::vector<std::thread> others;
    for (size_t rank = 1; rank < ranks.size(); ++rank) others.emplace_back([&, rank] { f(ranks[rank]); });
    f(ranks[0]);
    for (std::thread& other : others) other.join();
}

float in_tree(const float* x, int count) {
    return count == 1 ? x[0] : in_tree(x, count / 2) + in_tree(x + count / 2, count / 2);
}

// -- exchanges

// Every rank reads the same parts in 1,000 exchanges.
void exchanges(int world) {
    constexpr size_t kWidth = 576;
    const auto part = [](int rank, int exchange) {
        std::mt19937 rng(static_cast<unsigned>(8 * exchange + rank));
        return normal_floats(rng, kWidth);
    };
    on_ranks({world, kWidth * sizeof(float), 0, 0}, [&](const std::shared_ptr<Ranks>& ranks) {
        for (int i = 0; i < 1000; ++i) {
            const uint32_t exchange = ranks->exchange();
            const std::vector<float> mine = part(ranks->rank(), i);
            std::memcpy(ranks->mine(exchange), mine.data(), kWidth * sizeof(float));
            ranks->arrive(exchange);
            require(ranks->await(exchange), "a rank is lost");
            for (int rank = 0; rank < world && i % 100 == 0; ++rank) {
                const std::vector<float> wanted = part(rank, i);
                require(std::memcmp(ranks->of(rank, exchange), wanted.data(), kWidth * sizeof(float)) == 0,
                        "a rank reads another part");
            }
            ranks->passed(exchange + 1);
        }
    });
}

// Sums over ranks, of random floats: the tree's.
void sums(int world) {
    const auto part = [](int rank) {
        std::mt19937 rng(static_cast<unsigned>(rank));
        return normal_floats(rng, 100);
    };
    std::vector<float> wanted(100), parts(kMostRanks);
    for (size_t i = 0; i < wanted.size(); ++i) {
        for (int rank = 0; rank < world; ++rank) parts[static_cast<size_t>(rank)] = part(rank)[i];
        wanted[i] = in_tree(parts.data(), world);
    }
    on_ranks({world, 400, 0, 0}, [&](const std::shared_ptr<Ranks>& ranks) {
        std::vector<float> got(100);
        for (int i = 0; i < 5; ++i) {
            ranks->add_all(part(ranks->rank()), got.data());
            require(same_bits(got, wanted), "a sum is not the tree's");
        }
        require(throws([&] { ranks->add_all(std::vector<float>(101), got.data()); }), "a part larger than a slot");
    });
}

// Controls of the arithmetic: what a wrong exchange would compute has other bits.
void controls() {
    std::mt19937 rng(3);
    int rows = 0, biases = 0;
    for (int i = 0; i < 1000; ++i) {
        const std::vector<float> x = normal_floats(rng, 9);
        rows += in_tree(x.data(), 4) != ((x[0] + x[1]) + x[2]) + x[3];
        biases += (x[0] + x[1]) + x[8] != (x[0] + x[8]) + x[1];
    }
    require(rows > 100, "the control: ranks joined one after the other");
    require(biases > 100, "the control: a bias before the sum");
    const float negative_zero = -0.0f;
    require(std::signbit(negative_zero) && !std::signbit(negative_zero + 0.0f),
            "the control: an embedding as a sum with zeros");
}

// -- linear layers

struct CutLinear {
    PackedLinear linear;
    int begin, end;  // columns of the input
};

// The share of a rank in a layer of n rows and k columns, packed from whole blocks.
CutLinear cut(const Case& which, const std::vector<uint8_t>& rows, int unit, int rank, int world,
              const Kernels& kernels, Arena& arena, ThreadPool& pool) {
    const PackedKind kind = packed_kind(which.kind);
    const Columns mine = columns_of_rank(which.k, unit, rank, world);
    const int block = 64 * layout_of(kind).tiles();
    const int start = mine.begin / block * block, stop = std::min(which.k, (mine.end + block - 1) / block * block);
    const int64_t row_bytes = source_row_bytes(which.kind, which.k);
    const PackRequest request{
        {rows.data() + (start > 0 ? source_row_bytes(which.kind, start) : 0), row_bytes, which.kind, nullptr},
        kind,
        which.n,
        stop - start};
    PackedLinear linear({pack_tensor(request, kernels, arena, pool)}, false, unit, {rank, world, which.k, start});
    require(linear.inputs() == mine.end - mine.begin, "a share has other columns");
    return {std::move(linear), mine.begin, mine.end};
}

// Columns [begin, end) of x [rows][k], multiplied by a layer.
std::vector<float> product(const PackedLinear& linear, const std::vector<float>& x, int k, int begin, int end,
                           int direct_rows, const Kernels& kernels) {
    const int m = static_cast<int>(x.size()) / k, width = end - begin;
    const size_t tiles = static_cast<size_t>(tiles_of(width)), rows = static_cast<size_t>(m);
    const Exact<A8Block> blocks(rows * tiles);
    const Exact<uint16_t> halves(rows * tiles * 64);
    const Exact<uint8_t> scratch(kLinearScratchBytes);
    LinearWork work{&kernels, &linear, {}, {}, m, 1, {}, direct_rows};
    if (linear.bf16()) {
        work.bf16 = {halves.data(), static_cast<int32_t>(tiles) * 64};
        kernels.quantize->to_bf16(x.data() + begin, k, 0, m, width, {}, nullptr, work.bf16);
    } else {
        work.a8 = {blocks.data(), static_cast<int32_t>(tiles)};
        kernels.quantize->to_a8(x.data() + begin, k, 0, m, width, {}, nullptr, work.a8);
    }
    std::vector<float> out(rows * static_cast<size_t>(linear.n()));
    work.epilogue.kind = EpilogueKind::kStore, work.epilogue.out = out.data(), work.epilogue.stride = linear.n();
    run_linear_items(work, 0, linear_items(work), scratch.data());
    return out;
}

int begins = 0, orders = 0;  // controls

// A layer cut for `world` ranks: their products, joined as a tree, are the product of the whole layer.
void cut_linear(const Case& which, int unit, const Kernels& kernels, ThreadPool& pool, std::mt19937& rng) {
    const std::vector<uint8_t> rows = some_rows(which, rng);
    Arena arena(size_t{1} << 21);
    const CutLinear whole = cut(which, rows, unit, 0, 1, kernels, arena, pool);
    for (const int m : {1, 3, 40}) {
        const std::vector<float> x = normal_floats(rng, static_cast<size_t>(m * which.k));
        for (const int direct_rows : {1 << 30, -1}) {
            const auto times = [&](const PackedLinear& linear, int begin, int end) {
                return product(linear, x, which.k, begin, end, direct_rows, kernels);
            };
            const std::vector<float> wanted = times(whole.linear, 0, which.k);
            for (const int world : {2, 4, 8}) {
                std::vector<std::vector<float>> parts;
                for (int rank = 0; rank < world; ++rank) {
                    const CutLinear share = cut(which, rows, unit, rank, world, kernels, arena, pool);
                    parts.push_back(times(share.linear, share.begin, share.end));
                    // Control: the input is multiplied by the tiles from the start of the packed block on.
                    const int begin = share.linear.segments().begin;
                    if (begin == 0 || which.n < 33 || m < 40) continue;
                    const std::vector<float> wrong =
                        times(share.linear, share.begin - 64 * begin, share.end - 64 * begin);
                    begins += !same_bits(wrong, parts.back());
                }
                std::vector<float> joined(wanted.size()), in_order(wanted.size());
                for (size_t i = 0; i < wanted.size(); ++i) {
                    float sums[kMostRanks];
                    for (size_t rank = 0; rank < parts.size(); ++rank) sums[rank] = parts[rank][i];
                    joined[i] = in_tree(sums, world);
                    in_order[i] = std::accumulate(sums + 1, sums + world, sums[0]);
                }
                require(same_bits(joined, wanted), "a layer in parts is another layer");
                orders += world >= 4 && !same_bits(in_order, wanted);
            }
        }
    }
}

void cut_linears() {
    std::mt19937 rng(5);
    ThreadPool pool(1);
    for (const Kernels& kernels : tested_kernels()) {
        for (int kind = 0; kind <= static_cast<int>(SourceKind::kLast); ++kind) {
            const SourceKind source = static_cast<SourceKind>(kind);
            cut_linear({source, 33, 2304}, 64, kernels, pool, rng);
            cut_linear({source, 17, 2560}, 192, kernels, pool, rng);
        }
        cut_linear({SourceKind::kF32, 33, 545}, 64, kernels, pool, rng);  // the last tile is not full
    }
    require(begins > 0, "the control: the begin of a share's segments changes nothing");
    require(orders > 0, "the control: ranks joined one after the other have the same bits");
    require(throws([] { columns_of_rank(256, 64, 0, 8); }), "a layer of four units on eight ranks");
    require(throws([] { columns_of_rank(640, 64, 0, 3); }), "a layer on three ranks");
}

// -- models

constexpr int kHidden = 96, kLayers = 2, kBlock = 16, kBlocks = 48, kMax = 300, kVocab = 573;

struct Shape {
    int heads, kv_heads, dim, ffn;

    int group() const { return heads / kv_heads; }
    int unit() const { return std::lcm(dim, 64); }
};

struct Matrix {
    int columns;
    std::vector<float> values;

    Matrix(std::mt19937& rng, int rows, int k)
        : columns(k), values(normal_floats(rng, static_cast<size_t>(rows * k), 0.2f)) {}
};

struct Range {
    int first, last;
    int size() const { return last - first; }
};

struct Weights {
    struct Layer {
        Matrix q, k, v, out, gate, up, down;
        std::vector<float> out_bias, down_bias, shift;
    };

    Shape shape;
    Matrix table;
    std::vector<Layer> layers;

    Weights(const Shape& of, unsigned seed) : Weights(of, std::mt19937(seed)) {}

private:
    Weights(const Shape& of, std::mt19937 rng) : shape(of), table(rng, kVocab, kHidden) {
        const int q = of.heads * of.dim, kv = of.kv_heads * of.dim;
        for (int i = 0; i < kLayers; ++i) {
            layers.push_back({{rng, q, kHidden},
                              {rng, kv, kHidden},
                              {rng, kv, kHidden},
                              {rng, kHidden, q},
                              {rng, of.ffn, kHidden},
                              {rng, of.ffn, kHidden},
                              {rng, kHidden, of.ffn},
                              normal_floats(rng, kHidden),
                              normal_floats(rng, kHidden),
                              normal_floats(rng, static_cast<size_t>(kv))});
        }
    }
};

// Faults that a test builds into the ranks, as controls.
enum class Fault { kNone, kKvCopy, kNoGather };

// A model, or the share of a rank.
class Model {
public:
    struct Settings {
        Isa isa;
        KVType type;
        Rounding rounding = Rounding::kGroup;
        int split_from = 0;
        int threads = 1;
        Fault fault = Fault::kNone;
    };

    Model(const Weights& weights, const Settings& settings, std::shared_ptr<Ranks> ranks = nullptr)
        : weights_(weights),
          shape_(weights.shape),
          settings_(settings),
          kernels_(kernels_for(settings.isa)),
          rank_(ranks ? ranks->rank() : 0),
          world_(ranks ? ranks->world() : 1),
          pool_(std::make_shared<ThreadPool>(settings.threads)) {
        const Columns columns = columns_of_rank(shape_.heads * shape_.dim, shape_.unit(), rank_, world_);
        heads_ = {columns.begin / shape_.dim, columns.end / shape_.dim};
        kv_heads_ = {heads_.first / shape_.group(), (heads_.last - 1) / shape_.group() + 1};
        const auto kv = std::make_shared<KVPool>(settings.type, kLayers, kBlocks, kBlock, kv_heads_.size(), shape_.dim);
        program =
            std::make_unique<Program>(pool_, kv, kernels_, kHidden, kVocab, settings.rounding, 0.0f, std::move(ranks));
        program->split_from(settings.split_from);
        build();
    }

    std::unique_ptr<Program> program;

private:
    bool token() const { return settings_.rounding == Rounding::kToken; }

    // Rows [rows) and columns [begin, end) of a matrix.
    PackedTensor pack(const Matrix& matrix, Range rows, Range columns, const float* bias = nullptr) {
        const float* from = matrix.values.data() + rows.first * matrix.columns + columns.first;
        const PackRequest request{
            {reinterpret_cast<const uint8_t*>(from), int64_t{matrix.columns} * 4, SourceKind::kF32, nullptr},
            PackedKind::kQ8_0,
            rows.size(),
            columns.size(),
            bias};
        return pack_tensor(request, kernels_, arena_, *pool_);
    }
    PackedTensor pack(const Matrix& matrix, Range rows) { return pack(matrix, rows, {0, matrix.columns}); }
    Range scaled(Range heads) const { return {heads.first * shape_.dim, heads.last * shape_.dim}; }
    static NormWeights norm() { return {NormKind::kRms, std::vector<float>(kHidden, 1.0f), {}, 1e-5f}; }
    static std::vector<int32_t> borders(int world) {
        std::vector<int32_t> found;
        for (int rank = 0; rank <= world; ++rank)
            found.push_back(std::min(kVocab, (kVocab + 63) / 64 * rank / world * 64));
        return found;
    }
    Rope some_rope() const {
        Rope rope{{}, {}, shape_.dim, false};
        for (int i = 0; i < kMax * shape_.dim / 2; ++i) {
            const float angle = static_cast<float>(i / (shape_.dim / 2)) / static_cast<float>(1 + i % (shape_.dim / 2));
            rope.cos.push_back(std::cos(angle)), rope.sin.push_back(std::sin(angle));
        }
        return rope;
    }

    // A layer whose columns are cut: x = x + W in + bias.
    void add_cut(const Matrix& matrix, const std::vector<float>& bias, int unit, int in, int partial,
                 uint8_t sublayer) {
        const Columns mine = columns_of_rank(matrix.columns, unit, rank_, world_);
        const bool whole = world_ == 1;
        const PackedLinear linear({pack(matrix, {0, kHidden}, {mine.begin, mine.end}, whole ? bias.data() : nullptr)},
                                  false, unit, {rank_, world_, matrix.columns, mine.begin});
        if (whole) {
            program->add({LinearPhase{linear, in, EpilogueKind::kAdd, {0}}, sublayer});
            return;
        }
        program->add({LinearPhase{linear, in, EpilogueKind::kStore, {partial}}, sublayer});
        program->add({ReducePhase{partial, {0}, kHidden, true, bias}, sublayer, "", false, true});
    }

    void normed_input(int in, uint8_t sublayer, bool fills) {
        program->add({QuantizePhase{norm(), {0}, in}, sublayer, "", fills, true});
        // Control: the rank reads rows of the others that it has not received.
        if (world_ > 1 && settings_.fault != Fault::kNoGather) program->add({GatherPhase{in}, sublayer, "", fills});
    }

    // Float rows as an input whose scale is that of rows over all ranks.
    void cut_input(int from, int width, int in, int extremes, uint8_t sublayer) {
        if (world_ > 1) program->add({ExtremePhase{{from}, width, extremes}, sublayer});
        program->add({QuantizePhase{{}, {from}, in, {}, 0.0f, world_ > 1 ? extremes : -1}, sublayer});
    }

    void build() {
        const int q = heads_.size() * shape_.dim, kv = kv_heads_.size() * shape_.dim;
        const Columns ffn = columns_of_rank(shape_.ffn, 64, rank_, world_);
        const int wide = ffn.end - ffn.begin;
        const int qkv = program->add_buffer(BufferKind::kFloat, q + 2 * kv);
        const int in = program->add_buffer(BufferKind::kA8, kHidden, true);
        const int attended = program->add_buffer(BufferKind::kA8, q),
                  gated = program->add_buffer(BufferKind::kA8, wide);
        const int attended_rows = program->add_buffer(BufferKind::kFloat, q),
                  gated_rows = program->add_buffer(BufferKind::kFloat, wide);
        const int partial = program->add_buffer(BufferKind::kPartial, kHidden),
                  extremes = program->add_buffer(BufferKind::kFloat, 1);
        const int rope = program->add_rope(some_rope());
        const std::vector<int32_t> edges = borders(world_);
        const Range tokens{edges[static_cast<size_t>(rank_)], edges[static_cast<size_t>(rank_) + 1]};
        const PackedTensor table = pack(weights_.table, tokens);
        program->begin(SegmentKind::kEmbed);
        program->add({EmbedPhase{table, std::nullopt, 1.0f, 0, {}, -1, world_ > 1 ? edges : std::vector<int32_t>{}}});
        AttentionView view{heads_.size(), 0, true};
        if (world_ > 1) view.group = shape_.group(), view.skipped = heads_.first - kv_heads_.first * shape_.group();
        // Control: a rank takes the query heads of its second KV head for those of its first.
        if (settings_.fault == Fault::kKvCopy && view.skipped > 0 && kv_heads_.size() > 1) --view.skipped;
        for (int layer = 0; layer < kLayers; ++layer) {
            const Weights::Layer& of = weights_.layers[static_cast<size_t>(layer)];
            program->begin(SegmentKind::kLayer);
            normed_input(in, 0, true);
            const PackedLinear parts(
                {pack(of.q, scaled(heads_)), pack(of.k, scaled(kv_heads_)), pack(of.v, scaled(kv_heads_))}, false);
            program->add({LinearPhase{parts, in, EpilogueKind::kStore, {qkv}}, 0, "", true});
            const auto shift = of.shift.begin() + scaled(kv_heads_).first;
            program->add({AttentionPhase{layer,
                                         view,
                                         {qkv},
                                         {qkv, q},
                                         {qkv, q + kv},
                                         {token() ? attended_rows : attended},
                                         {},
                                         {},
                                         rope,
                                         0.2f,
                                         0.0f,
                                         {},
                                         std::vector<float>(shift, shift + kv)},
                          1, "", true});
            if (token()) cut_input(attended_rows, q, attended, extremes, 1);
            add_cut(of.out, of.out_bias, shape_.unit(), attended, partial, 1);
            normed_input(in, 2, false);
            const PackedLinear pair({pack(of.gate, {ffn.begin, ffn.end}), pack(of.up, {ffn.begin, ffn.end})}, true);
            program->add({LinearPhase{pair, in, EpilogueKind::kGated, {token() ? gated_rows : gated}}, 2});
            if (token()) cut_input(gated_rows, wide, gated, extremes, 2);
            add_cut(of.down, of.down_bias, 64, gated, partial, 2);
        }
        program->begin(SegmentKind::kHead);
        const int head = program->add_buffer(BufferKind::kA8, kHidden, true);
        const auto shared = [&](int width) {
            return world_ > 1 ? program->add_common_buffer(width) : program->add_buffer(BufferKind::kFloat, width);
        };
        const int logits = shared(kVocab), maxima = shared((kVocab + 63) / 64);
        program->add({QuantizePhase{norm(), {1}, head}});
        program->add({LinearPhase{PackedLinear({table}, false),
                                  head,
                                  EpilogueKind::kLogits,
                                  {logits, tokens.first},
                                  Activation::kSilu,
                                  1.0f,
                                  0.0f,
                                  maxima}});
        if (world_ > 1) program->add({GatherPhase{logits}});
        program->seal();
    }

    const Weights& weights_;
    const Shape shape_;
    const Settings settings_;
    const Kernels& kernels_;
    const int rank_, world_;
    const std::shared_ptr<ThreadPool> pool_;
    Range heads_{}, kv_heads_{};
    Arena arena_{size_t{1} << 21};
};

std::shared_ptr<Sequence> sequence(std::mt19937& rng, int length, int number) {
    std::vector<int32_t> tokens(static_cast<size_t>(length));
    for (int32_t& token : tokens) token = below(rng, kVocab);
    auto made = std::make_shared<Sequence>(Sequence{History(tokens), {}, {}});
    std::vector<int32_t> blocks(kBlocks / 4);
    std::iota(blocks.begin(), blocks.end(), number * kBlocks / 4);
    made->set_table(0, 0, blocks);
    return made;
}

// Everything that a step does; returns all numbers that it answers. With a fault asks may fail: they answer nothing.
std::vector<float> scenario(Program& program, Fault fault = Fault::kNone) {
    std::vector<float> found;
    const auto keep = [&](const std::vector<float>& values) {
        found.insert(found.end(), values.begin(), values.end());
    };
    const auto keep_answers = [&](Step& step) {
        for (const Answer& answer : step.answers()) {
            require(fault != Fault::kNone || answer.problem().empty(), "an ask fails");
            keep(answer.logits);
            for (const TokenReport& report : answer.reports) keep({static_cast<float>(report.id), report.logprob});
            for (const int32_t node : answer.path) keep({static_cast<float>(node)});
        }
    };
    std::mt19937 rng(17);
    std::vector<std::shared_ptr<Sequence>> sequences;
    for (int i = 0; i < 3; ++i) sequences.push_back(sequence(rng, 40 + 17 * i, i));
    const auto length = [&](size_t i) { return static_cast<int>(sequences[i]->history.tokens().size()); };
    Step step;
    // Three prompts, with every kind of ask.
    for (size_t i = 0; i < 3; ++i) {
        step.feed(sequences[i], 0, length(i), {}, {}, 2);
        step.logits(1);
        step.draw(1, {{1, 2}, {3, 4}}, {2, true}, std::nullopt);
        step.top(0, 5);
    }
    program.run(step);
    keep_answers(step);
    // One row, then a draft with a wrong branch; a skipped sublayer.
    step.clear();
    step.feed(sequences[0], length(0) - 1, 1, {}, {}, 1);
    step.logits(0);
    program.run(step);
    keep_answers(step);
    step.clear();
    const std::vector<int32_t> nodes{5, 1, 7, 2, 9}, parents{-1, -1, 0, 0, 2};
    step.feed(sequences[1], length(1) - 4, 1, nodes, parents, 6);
    step.logits(5);
    step.verify(0, {5, 6}, {1, false}, std::nullopt);
    step.skips = {0, 2};
    program.run(step);
    keep_answers(step);
    // A model in two halves, whose second layer then only stores K and V.
    std::vector<float> between(static_cast<size_t>(length(2) * kHidden)), last = between;
    const auto half = [&](int first, int end, const float* from, float* to, bool fill) {
        step.clear();
        step.feed(sequences[2], 0, length(2), {}, {}, 0);
        step.first_layer = first, step.last_layer = end, step.hidden = from, step.hidden_out = to, step.fill = fill;
        program.run(step);
    };
    half(0, 1, nullptr, between.data(), false);
    half(1, 2, between.data(), last.data(), false);
    keep(between), keep(last);
    for (float& value : between) value *= 0.5f;
    half(1, 2, between.data(), nullptr, true);
    // Moved and copied K and V, read by the next token.
    std::vector<std::pair<int32_t, int32_t>> moves, copies;
    for (int i = 0; i < 8; ++i) moves.emplace_back(2 * kBlocks / 4 * kBlock + i, 2 * kBlocks / 4 * kBlock + i + 16);
    copies.emplace_back(2 * kBlocks / 4 + 2, 2 * kBlocks / 4);
    program.move(moves);
    program.copy_blocks(copies);
    step.clear();
    step.feed(sequences[2], length(2) - 1, 1, {}, {}, 1);
    step.logits(0);
    program.run(step);
    keep_answers(step);
    // A masked draw needs few blocks of the vocabulary; many rows of logits are computed in chunks.
    step.clear();
    step.feed(sequences[0], length(0) - 1, 1, {}, {}, 1);
    std::vector<uint32_t> mask((kVocab + 31) / 32);
    for (const int id : {130, 131, 400}) mask[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
    step.mask(mask);
    step.draw(0, {{1, 2}}, {}, std::nullopt);
    program.run(step);
    keep_answers(step);
    const auto many = sequence(rng, 170, 3);
    step.clear();
    step.feed(many, 0, 170, {}, {}, 170);
    for (int row = 0; row < 170; row += 13) step.logits(row);
    int scores;
    step.score(3, 2, scores);
    program.run(step);
    keep_answers(step);
    // An invalid step is refused before the other ranks hear of it.
    Step bad;
    require(throws([&] { program.run(bad); }), "an empty step runs");
    bad.feed(sequence(rng, 3, 0), 0, 3, {}, {}, 0);
    bad.first_layer = 7;
    require(throws([&] { program.run(bad); }), "a step of layers that are not there runs");
    program.run(step);
    return found;
}

Region::Sizes sizes_for(int world) {
    const int64_t logits = Program::kMostHeadRows * (Buffer::stride_of(kVocab) + Buffer::stride_of((kVocab + 63) / 64));
    return {world, kMax * Buffer::stride_of(kHidden) * 4, logits * 4, 1 << 20};
}

std::vector<float> on_world(int world, const Weights& weights, const Model::Settings& settings) {
    std::vector<float> found;
    on_ranks(sizes_for(world), [&](const std::shared_ptr<Ranks>& ranks) {
        Model model(weights, settings, ranks);
        if (ranks->rank() > 0) {
            Program* const programs[] = {model.program.get()};
            return follow(*ranks, programs);
        }
        found = scenario(*model.program, settings.fault);
        ranks->end();
    });
    return found;
}

void models() {
    const Weights uneven({9, 3, 64, 544}, 1), single({8, 1, 32, 512}, 2), many({16, 8, 32, 576}, 3);
    int caught = 0;
    for (const Isa isa : supported_isas()) {
        for (const KVType type : {KVType::kBf16, KVType::kInt8, KVType::kInt4}) {
            for (const Rounding rounding : {Rounding::kGroup, Rounding::kToken}) {
                for (const Weights* weights : {&uneven, &single, &many}) {
                    Model::Settings settings{isa, type, rounding};
                    const bool usual = rounding == Rounding::kGroup && type == KVType::kBf16;
                    if (weights != &uneven && !usual) continue;
                    Model whole(*weights, settings);
                    const std::vector<float> wanted = scenario(*whole.program);
                    for (const int world : {2, 4, 8}) {
                        if (weights == &single && world == 8) continue;  // four units of heads
                        if (!usual && world > 2) continue;               // minutes under the thread sanitizer
                        settings.split_from = 0, settings.threads = world == 2 ? 2 : 1;
                        require(same_bits(on_world(world, *weights, settings), wanted), "ranks have other bits");
                        settings.split_from = 40;
                        require(same_bits(on_world(world, *weights, settings), wanted),
                                "ranks that split the rows have other bits");
                    }
                    if (weights != &uneven) continue;
                    settings.fault = Fault::kKvCopy;
                    caught += !same_bits(on_world(2, *weights, settings), wanted);
                    settings.fault = Fault::kNoGather;
                    require(!usual || !same_bits(on_world(2, *weights, settings), wanted),
                            "the control: rows that are not received change nothing");
                }
            }
        }
    }
    require(caught > 0, "the control: a query head that reads another KV head changes nothing");
}

// -- skipped layers

// Two steps, the second of which skips sublayers; returns its logits, or none if a rank is lost.
std::vector<float> skipping_steps(Program& program) {
    std::mt19937 rng(5);
    const auto text = sequence(rng, 20, 0);
    std::vector<float> logits;
    try {
        for (const bool skipping : {false, true}) {
            Step step;
            step.feed(text, 0, 20, {}, {}, 1);
            step.logits(0);
            if (skipping) step.skips = {0, 2};
            program.run(step);
            logits = step.answers().front().logits;
        }
    } catch (const RankLost&) {
        return {};
    }
    return logits;
}

// As follow(), with the skips of the step before.
void follow_late(Ranks& ranks, Program& program) {
    std::vector<uint8_t> last, changed;
    try {
        for (std::span<const uint8_t> message; !(message = ranks.receive()).empty(); ranks.finish()) {
            ReadCommand command(message);
            std::vector<uint8_t> skips(command.rows.skips.begin(), command.rows.skips.end());
            last.swap(skips);
            command.rows.skips = skips;
            changed.resize(message.size() + 64);
            program.obey(std::span(changed).first(write_rows(command.rows, kHidden, command.program, changed)));
        }
    } catch (const RankLost&) {
    }
}

void late_skips() {
    const Weights weights({9, 3, 64, 544}, 1);
    const Model::Settings settings{supported_isas().front(), KVType::kBf16};
    Model whole(weights, settings);
    const std::vector<float> wanted = skipping_steps(*whole.program);
    const auto ranked = [&](bool late, std::chrono::milliseconds timeout) {
        std::vector<float> logits;
        on_ranks(
            sizes_for(2),
            [&](const std::shared_ptr<Ranks>& ranks) {
                Model model(weights, settings, ranks);
                Program* const programs[] = {model.program.get()};
                if (ranks->rank() > 0) return late ? follow_late(*ranks, *model.program) : follow(*ranks, programs);
                logits = skipping_steps(*model.program);
                ranks->end();
            },
            timeout);
        return logits;
    };
    require(!wanted.empty() && same_bits(ranked(false, kTimeout), wanted), "ranks skip other layers");
#if !defined(__SANITIZE_THREAD__)  // ranks that disagree about their exchanges race for them
    require(!same_bits(ranked(true, 2s), wanted), "the control: the skips of the step before change nothing");
#endif
}

// -- lost ranks

// A rank that is silent, gives up, or whose process ends: the others stop within the time.
void losses() {
    const auto lost = [](const std::function<void(Ranks&)>& other, std::chrono::milliseconds timeout) {
        const auto start = Ranks::Clock::now();
        std::string reason;
        on_ranks(
            {2, 64, 0, 64},
            [&](const std::shared_ptr<Ranks>& ranks) {
                if (ranks->rank() == 1) return other(*ranks);
                ranks->arrive(0);
                require(!ranks->await(0), "a lost rank has arrived");
                reason = ranks->reason();
                require(throws([&] { ranks->next_message(); }), "a command to a lost rank");
            },
            timeout);
        require(Ranks::Clock::now() - start < 20s, "a lost rank is noticed late");
        return reason;
    };
    require(lost([](Ranks&) {}, 100ms).find("rank 1 of 2 has not answered") == 0, "a silent rank");
    require(lost([](Ranks& ranks) { ranks.give_up(); }, kTimeout) == "rank 1 of 2 has failed", "a rank that gives up");

    const auto region = std::make_shared<Region>(Region::Sizes{2, 64, 0, 64});
    const pid_t child = fork();
    require(child >= 0, "no process");
    if (child == 0) {
        const Ranks ranks(std::make_shared<Region>(region->descriptor()), 1, kTimeout);
        _exit(0);
    }
    int status;
    require(waitid(P_PID, static_cast<id_t>(child), nullptr, WEXITED | WNOWAIT) == 0, "no child");
    Ranks ranks(region, 0, kTimeout);
    ranks.arrive(0);
    require(!ranks.await(0) && ranks.reason() == "rank 1 of 2 has ended", "a process that ended");
    require(waitpid(child, &status, 0) == child && status == 0, "the child fails");
    require(throws([&] { const Ranks again(region, 0, kTimeout); }), "two processes with one rank");
    require(throws([&] { const Ranks none(region, 2, kTimeout); }), "a rank that is not there");
    require(throws([] { const Region three({3, 64, 0, 64}); }), "three ranks");
    require(throws([] { const Region other(0); }), "a region that is none");
}

// A follower whose command fails ends all ranks; a step that does not fit the region is refused.
void failures() {
    const Weights weights({8, 1, 32, 512}, 2);
    const Model::Settings settings{supported_isas().front(), KVType::kBf16};
    Region::Sizes sizes = sizes_for(2);
    sizes.slot_bytes = 8 * Buffer::stride_of(kHidden) * 4;
    on_ranks(sizes, [&](const std::shared_ptr<Ranks>& ranks) {
        Model model(weights, settings, ranks);
        if (ranks->rank() > 0) {
            require(throws([&] { follow(*ranks, {}); }), "a program that is not there runs");  // the leader's number 0
            return;
        }
        std::mt19937 rng(1);
        Step step;
        step.feed(sequence(rng, 9, 0), 0, 9, {}, {}, 1);
        require(throws([&] { model.program->run(step); }) && ranks->reason().empty(), "nine rows in a region of eight");
        step.clear();
        step.feed(sequence(rng, 8, 0), 0, 8, {}, {}, 1);
        require(throws([&] { model.program->run(step); }), "a step whose rank failed");
        require(ranks->reason() == "rank 1 of 2 has failed", "another rank failed");
    });
}

}  // namespace

int main() {
    losses();
    for (const int world : {2, 4, 8}) exchanges(world), sums(world);
    controls();
    cut_linears();
    models();
    late_skips();
    failures();
    std::puts("ranks: ok");
    return 0;
}
