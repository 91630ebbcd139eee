// Tests of a small model as a program, also run under the sanitizers: sequences in one batch, in chunks and as a draft
// tree, on several threads and from two programs that share a pool.
#include "program/program.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <numeric>
#include <thread>

#include "check.h"
#include "missing_memory.h"
#include "pack/pack.h"

using namespace headrace;
using namespace headrace::test;

namespace {

constexpr int kHidden = 96, kHeads = 3, kDim = 32, kFfn = 160, kVocab = 301, kLayers = 2, kBlock = 16, kBlocks = 24,
              kMax = 200, kSource = 20;
constexpr int kQkv = (kHeads + 2) * kDim;

// `reads`: the rows also attend to a source; the program `storing` stores its K and V from hidden rows.
class Model {
public:
    Model(std::shared_ptr<ThreadPool> pool, const Kernels& kernels, KVType type, bool reads = false)
        : pool_(std::move(pool)),
          kernels_(kernels),
          kv_(std::make_shared<KVPool>(type, kLayers, kBlocks, kBlock, 1, kDim)),
          program(pool_, kv_, kernels, kHidden, kVocab),
          storing(pool_, kv_, kernels, kHidden, kVocab) {
        const int x = 0, qkv = program.add_buffer(BufferKind::kFloat, kQkv);
        const int in = program.add_buffer(BufferKind::kA8, kHidden, true),
                  attended = program.add_buffer(BufferKind::kA8, kHeads * kDim);
        const int wide = program.add_buffer(BufferKind::kA8, kFfn);
        const PackedTensor table = weight(kVocab, kHidden);
        const int rope = program.add_rope(some_rope());
        program.begin(SegmentKind::kEmbed);
        program.add({EmbedPhase{table, std::nullopt, 1.0f, x}});
        for (int layer = 0; layer < kLayers; ++layer) {
            program.begin(SegmentKind::kLayer);
            program.add({QuantizePhase{norm(), {x}, in}});
            program.add({LinearPhase{PackedLinear({weight(kQkv, kHidden)}, false), in, EpilogueKind::kStore, {qkv}}});
            program.add({AttentionPhase{layer,
                                        {kHeads, 0, true},
                                        {qkv},
                                        {qkv, kHeads * kDim},
                                        {qkv, (kHeads + 1) * kDim},
                                        {attended},
                                        {},
                                        {},
                                        rope,
                                        0.2f,
                                        0.0f,
                                        {},
                                        std::vector<float>(kDim, 0.5f)},
                         1});
            program.add(
                {LinearPhase{PackedLinear({weight(kHidden, kHeads * kDim)}, false), attended, EpilogueKind::kAdd, {x}},
                 1});
            if (reads) read_source(layer, in, qkv, attended);
            program.add({QuantizePhase{norm(), {x}, in}, 2});
            const auto [gate, up] = pair();
            program.add({LinearPhase{PackedLinear({gate, up}, true), in, EpilogueKind::kGated, {wide}}, 2});
            program.add({LinearPhase{PackedLinear({weight(kHidden, kFfn)}, false), wide, EpilogueKind::kAdd, {x}}, 2});
        }
        program.begin(SegmentKind::kHead);
        const int head = program.add_buffer(BufferKind::kA8, kHidden, true),
                  logits = program.add_buffer(BufferKind::kFloat, kVocab);
        const int maxima = program.add_buffer(BufferKind::kFloat, (kVocab + 63) / 64);
        program.add({QuantizePhase{norm(), {1}, head}});
        program.add({LinearPhase{PackedLinear({table}, false),
                                 head,
                                 EpilogueKind::kLogits,
                                 {logits},
                                 Activation::kSilu,
                                 1.0f,
                                 0.0f,
                                 maxima}});
    }

    KVPool& pool() { return *kv_; }

private:
    void read_source(int layer, int in, int qkv, int attended) {
        const auto linear = [&](int n, int k) { return PackedLinear({weight(n, k)}, false); };
        program.add({QuantizePhase{norm(), {0}, in}, 1});
        program.add({LinearPhase{linear(kHeads * kDim, kHidden), in, EpilogueKind::kStore, {qkv}}, 1});
        program.add(
            {AttentionPhase{layer, {kHeads, 0, true, true}, {qkv}, {}, {}, {attended}, {}, {}, -1, 0.2f, 0.0f, {}, {}},
             1});
        program.add({LinearPhase{linear(kHidden, kHeads * kDim), attended, EpilogueKind::kAdd, {0}}, 1});
        const int input = storing.add_buffer(BufferKind::kA8, kHidden, true),
                  stored = storing.add_buffer(BufferKind::kFloat, 2 * kDim);
        storing.begin(SegmentKind::kLayer);
        storing.add({QuantizePhase{{}, {0}, input}});
        storing.add({LinearPhase{linear(2 * kDim, kHidden), input, EpilogueKind::kStore, {stored}}});
        storing.add({StorePhase{layer, {stored}, {stored, kDim}}});
    }
    PackRequest floats(int n, int k) {
        kept_.push_back(normal_floats(rng_, static_cast<size_t>(n * k), 0.2f));
        const auto* rows = reinterpret_cast<const uint8_t*>(kept_.back().data());
        return {{rows, int64_t{k} * 4, SourceKind::kF32, nullptr}, PackedKind::kQ8_0, n, k};
    }
    PackedTensor weight(int n, int k) { return pack_tensor(floats(n, k), kernels_, arena_, *pool_); }
    std::pair<PackedTensor, PackedTensor> pair() {
        const PackRequest gate = floats(kFfn, kHidden), up = floats(kFfn, kHidden);
        return pack_pair(gate, up, kernels_, arena_, *pool_);
    }
    static NormWeights norm() { return {NormKind::kRms, std::vector<float>(kHidden, 1.0f), {}, 1e-5f}; }
    static Rope some_rope() {
        Rope rope{{}, {}, kDim, false};
        for (int i = 0; i < kMax * kDim / 2; ++i) {
            const float angle = static_cast<float>(i / (kDim / 2)) / static_cast<float>(1 + i % (kDim / 2));
            rope.cos.push_back(std::cos(angle)), rope.sin.push_back(std::sin(angle));
        }
        return rope;
    }

    const std::shared_ptr<ThreadPool> pool_;
    const Kernels& kernels_;
    const std::shared_ptr<KVPool> kv_;
    std::mt19937 rng_{11};
    std::vector<std::vector<float>> kept_;
    Arena arena_{size_t{1} << 21};

public:
    Program program, storing;
};

std::shared_ptr<Sequence> sequence(const std::vector<int32_t>& tokens, int first_block) {
    auto made = std::make_shared<Sequence>(Sequence{History(tokens), {}, {}});
    std::vector<int32_t> blocks(kBlocks / 3);
    std::iota(blocks.begin(), blocks.end(), first_block);
    made->set_table(0, 0, blocks);
    made->source = kSource;
    made->set_table(1, 0, std::span(blocks).last(2));  // more blocks than its tokens need
    return made;
}

// Stores K and V of the sources of all sequences, from random rows.
void store_sources(Program& storing, unsigned seed) {
    std::mt19937 rng(seed);
    std::vector<float> rows = normal_floats(rng, static_cast<size_t>(3 * kSource * kHidden));
    Step step;
    for (int i = 0; i < 3; ++i) {
        const auto source = std::make_shared<Sequence>(Sequence{History(std::vector<int32_t>(kSource, 1)), {}, {}});
        source->set_table(0, 0, sequence({1}, i * kBlocks / 3)->tables[1]);
        step.feed(source, 0, kSource, {}, {}, 0);
    }
    step.hidden = rows.data();
    storing.run(step);
}

std::vector<float> row(Step& step, int answer) { return step.answers()[static_cast<size_t>(answer)].logits; }

// Three sequences: in one step; in mixed chunks; and with the last tokens as a draft with wrong branches.
void check(Program& program, unsigned seed) {
    std::mt19937 rng(seed);
    std::vector<std::shared_ptr<Sequence>> sequences;
    for (int i = 0; i < 3; ++i) {
        std::vector<int32_t> tokens(static_cast<size_t>(40 + 17 * i));
        for (int32_t& token : tokens) token = below(rng, kVocab);
        sequences.push_back(sequence(tokens, i * kBlocks / 3));
    }
    Step step;
    std::vector<std::vector<float>> wanted;
    std::vector<int> asked;
    const auto length = [&](size_t i) { return static_cast<int>(sequences[i]->history.tokens().size()); };
    for (size_t i = 0; i < 3; ++i) {
        step.feed(sequences[i], 0, length(i), {}, {}, 1);
        asked.push_back(step.logits(0));
        step.draw(0, {{1, 2}, {3, 4}}, {2, true}, std::nullopt);
        step.top(0, 5);
    }
    program.run(step);
    for (const int answer : asked) wanted.push_back(row(step, answer));
    const int32_t drawn = step.answers()[1].reports.front().id;
    require(drawn >= 0 && drawn < kVocab, "a token outside the vocabulary");
    std::vector<int> done(3);
    for (int round = 0; round < 200 && done != std::vector<int>{length(0) - 4, length(1) - 4, length(2) - 4}; ++round) {
        step.clear();
        for (size_t i = 0; i < 3; ++i) {
            const int count = std::min(below(rng, 20), length(i) - 4 - done[i]);
            if (count == 0) continue;
            step.feed(sequences[i], done[i], count, {}, {}, 0);
            done[i] += count;
        }
        if (step.rows() > 0) program.run(step);
    }
    for (size_t i = 0; i < 3; ++i) {
        const std::vector<int32_t>& tokens = sequences[i]->history.tokens();
        const size_t end = tokens.size();
        // The last three tokens as nodes 0, 2, 4, with a wrong token next to each.
        const std::vector<int32_t> nodes{tokens[end - 3], 1, tokens[end - 2], 2, tokens[end - 1]},
            parents{-1, -1, 0, 0, 2};
        step.clear();
        step.feed(sequences[i], static_cast<int>(end) - 4, 1, nodes, parents, 6);
        const int last = step.logits(5);
        step.verify(0, {5, 6}, {1, false}, std::nullopt);
        program.run(step);
        require(same_bits(row(step, last), wanted[i]), "a draft's last node has other logits");
        require(step.answers()[1].error.empty() && !step.answers()[1].reports.empty(), "verification says nothing");
    }
}

// Steps from hidden rows and with a skipped sublayer, and invalid steps.
void parts(Program& program) {
    std::vector<float> hidden(static_cast<size_t>(5 * kHidden)), between = hidden, whole = hidden, again = hidden;
    const auto tokens = sequence({1, 2, 3, 4, 5}, 0);
    const auto run = [&](int first, int last, const float* from, std::vector<float>& to,
                         std::vector<uint8_t> skips = {}) {
        Step step;
        step.feed(tokens, 0, 5, {}, {}, 0);
        step.first_layer = first, step.last_layer = last, step.hidden = from, step.hidden_out = to.data();
        step.skips = std::move(skips);
        program.run(step);
    };
    run(0, -1, nullptr, whole);
    run(0, 1, nullptr, between);
    run(1, 2, between.data(), again);
    require(same_bits(whole, again), "a model in two parts is another model");
    run(0, -1, nullptr, again, {3, 3});
    run(0, 0, nullptr, between);
    require(same_bits(again, between), "skipped sublayers leave something");
    Step bad;
    require(throws([&] { program.run(bad); }), "an empty step runs");
    bad.feed(sequence({kVocab}, 0), 0, 1, {}, {}, 1);
    require(throws([&] { program.run(bad); }), "an id outside the vocabulary runs");
}

using Units = std::vector<int32_t>;
constexpr int kWords = (kVocab + 31) / 32;

std::vector<uint32_t> mask_of(const std::vector<std::vector<int32_t>>& rows) {
    std::vector<uint32_t> words(rows.size() * kWords);
    for (size_t row = 0; row < rows.size(); ++row) {
        for (const int32_t id : rows[row]) words[row * kWords + static_cast<size_t>(id) / 32] |= 1u << (id % 32);
    }
    return words;
}

// Draws with masks or allowed ids: the computed blocks of the vocabulary, and the same tokens as with the full head.
void limited(Program& program) {
    const auto tokens = sequence({1, 2, 3, 4, 5}, 0), few = sequence({1, 2, 3, 4, 5}, 0);
    few->params.only_allowed = true, few->params.allowed = {300, 65, 70};
    const std::vector<int32_t> all = [] {
        std::vector<int32_t> ids(kVocab);
        std::iota(ids.begin(), ids.end(), 0);
        return ids;
    }();
    const auto units = [&](const std::shared_ptr<Sequence>& of, const std::vector<std::vector<int32_t>>& masks,
                           Report report, bool whole, int32_t& drawn) {
        Step step;
        step.feed(of, 0, 5, {}, {}, 1);
        if (!masks.empty()) step.mask(mask_of(masks));
        step.draw(0, {{1, 2}}, report, std::nullopt);
        if (whole) step.logits(0);
        const Units wanted = wanted_units(step.asks(), 0, 1, kVocab);
        program.run(step);
        require(step.answers()[0].error.empty(), "a limited draw fails");
        drawn = step.answers()[0].reports.front().id;
        return wanted;
    };
    int32_t one, other;
    require(units(tokens, {{130, 131, 200}}, {}, false, one) == Units{2, 3}, "blocks 2 and 3 are wanted");
    require(units(tokens, {{130, 131, 200}}, {}, true, other).empty(), "a row of logits needs the whole head");
    require(one == other, "a part of the head draws another token");
    require(units(tokens, {{130, 131, 200}}, {1, false}, false, other).empty(), "so do log-probabilities");
    require(units(tokens, {{130, 131, 200}}, {1, true}, false, other) == Units{2, 3}, "those of what was drawn do not");
    require(one == other, "what is told changes what is drawn");
    require(units(few, {}, {}, false, one) == Units{1, 4}, "the blocks of the allowed ids");
    require(units(few, {}, {}, true, other).empty() && one == other, "allowed ids draw another token");
    require(units(tokens, {}, {}, false, one).empty(), "nothing limits this row");
    require(units(tokens, {all}, {}, false, one).empty(), "everything is allowed");
    // Two rows in one step: the blocks of both; if one row has no limit, all blocks.
    for (const bool free : {false, true}) {
        Step step;
        step.feed(tokens, 0, 5, {}, {}, 1);
        step.mask(mask_of({{130}}));
        step.draw(0, {{1, 2}}, {}, std::nullopt);
        step.feed(sequence({7, 8}, kBlocks / 3), 0, 1, std::vector<int32_t>{8}, std::vector<int32_t>{-1}, 2);
        if (!free) step.mask(mask_of({{8}, {9, 290}}));
        step.verify(0, {5, 6}, {}, std::nullopt);
        const Units wanted = wanted_units(step.asks(), 0, 3, kVocab);
        require(wanted == (free ? Units{} : Units{0, 2, 4}), "what either row wants");
        program.run(step);
        require(step.answers()[0].reports.front().id == 130, "the only token that may come");
        if (!free) require(step.answers()[1].reports.front().id == 8, "the only token that may come next");
    }
}

// A step with asks of every kind, run again with each allocation failing once. The step or some answers have an error,
// the other answers are correct, and later steps are not affected.
void without_memory(Program& program) {
    std::mt19937 rng(7);
    std::vector<std::shared_ptr<Sequence>> sequences;
    for (int i = 0; i < 3; ++i) {
        std::vector<int32_t> tokens(20);
        for (int32_t& token : tokens) token = below(rng, kVocab);
        sequences.push_back(sequence(tokens, i * kBlocks / 3));
        sequences.back()->params.frequency = 0.5f;
        sequences.back()->params.top_p = 0.9;
        sequences.back()->params.no_repeat_ngram = 2;
    }
    const auto ask = [&](Step& step) {
        step.clear();
        for (const auto& each : sequences) {
            const std::vector<int32_t> nodes{1, 2}, parents{-1, 0};
            step.feed(each, 0, 20, nodes, parents, 3);
            Answer amateur;
            amateur.logits.assign(kVocab, 0.25f);
            step.combine(0, amateur, Rule::kContrast, 0.1f, 0.5f);
            step.draw(0, {{1, 2}, {3, 4}}, {2, true}, std::nullopt);
            step.verify(0, {5, 6}, {1, false}, std::nullopt);
            step.propose(1, {7, 8});
            step.top(1, 4);
            step.logits(2);
        }
    };
    const auto same = [](const Answer& a, const Answer& b) {
        bool equal = a.path == b.path && same_bits(a.logits, b.logits) && a.reports.size() == b.reports.size();
        for (size_t i = 0; equal && i < a.reports.size(); ++i)
            equal = a.reports[i].id == b.reports[i].id && a.reports[i].top_logprobs == b.reports[i].top_logprobs;
        return equal;
    };
    Step whole, step;
    ask(whole);
    program.run(whole);
    int steps = 0, answers = 0;
    for (int allocation = 0;; ++allocation) {
        ask(step);
        failed = 0;
        left_to_allocate = allocation;
        bool refused = false;
        try {
            program.run(step);
        } catch (const std::bad_alloc&) {
            refused = true;
        }
        left_to_allocate = -1;
        if (failed == 0) break;  // there are no more allocations
        steps += refused;
        for (size_t i = 0; !refused && i < step.answers().size(); ++i) {
            const Answer& answer = step.answers()[i];
            answers += answer.failure != nullptr;
            if (answer.failure) require(answer.problem().find("memory") != std::string::npos, "another problem");
            require(answer.failure || same(answer, whole.answers()[i]), "another request's memory changed an answer");
        }
    }
    require(steps > 0 && answers > 0, "nothing failed for want of memory");
    ask(step);
    program.run(step);
    for (size_t i = 0; i < step.answers().size(); ++i)
        require(same(step.answers()[i], whole.answers()[i]), "a step without memory spoilt the next");
}

// While a step runs, another step of the same program and changes of its inputs are refused.
void busy(Program& program, KVPool& kv) {
    const auto tokens = sequence({1, 2, 3}, 0);
    Step step;
    step.feed(tokens, 0, 3, {}, {}, 1);
    step.logits(0);
    program.run(step);
    const std::vector<float> wanted = row(step, 0);
    {
        const Exclusive other(program.in_use);
        require(throws([&] { program.run(step); }), "two steps at once");
    }
    {
        const Exclusive other(kv.in_use);
        require(throws([&] { program.run(step); }), "a step while the pool is written");
    }
    {
        const Exclusive other(tokens->in_use);
        require(throws([&] { program.run(step); }), "a step while its sequence grows");
    }
    {
        const Shared reader(tokens->in_use), another(tokens->in_use);
        program.run(step);
        require(throws([&] { const Exclusive writer(tokens->in_use); }), "a sequence grows while it is read");
        require(throws([&] { kv.copy_blocks(std::vector<std::pair<int32_t, int32_t>>{{0, kBlocks}}); }),
                "a block that is not there");
    }
    program.run(step);
    require(same_bits(row(step, 0), wanted), "a refusal left something behind");
}

// Different sources give different logits, equal sources equal ones; rows without a source are refused.
void sources(Model& model) {
    const auto tokens = sequence({1, 2, 3}, 0);
    std::vector<std::vector<float>> seen;
    for (const unsigned seed : {3U, 4U, 3U}) {
        store_sources(model.storing, seed);
        Step step;
        step.feed(tokens, 0, 3, {}, {}, 1);
        step.logits(0);
        model.program.run(step);
        seen.push_back(row(step, 0));
    }
    require(same_bits(seen[0], seen[2]) && !same_bits(seen[0], seen[1]),
            "a source changes nothing, or something else does");
    tokens->source = 0;
    Step bad;
    bad.feed(tokens, 0, 3, {}, {}, 0);
    require(throws([&] { model.program.run(bad); }), "rows read a source that is not there");
}

}  // namespace

int main() {
    for (const Isa isa : supported_isas()) {
        for (const KVType type : {KVType::kBf16, KVType::kInt8, KVType::kInt4}) {
            auto pool = std::make_shared<ThreadPool>(3);
            Model one(pool, kernels_for(isa), type);
            Model two(pool, kernels_for(isa), type, true);
            store_sources(two.storing, 3);
            check(one.program, 1);
            parts(one.program);
            limited(one.program);
            without_memory(one.program);
            busy(one.program, one.pool());
            std::thread other([&] { check(two.program, 2); });
            check(one.program, 3);
            other.join();
            sources(two);
        }
    }
    std::puts("program: ok");
    return 0;
}
