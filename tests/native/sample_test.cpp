// Tests of the sampler, also run under the sanitizers: random parameters; all instruction sets must agree.
#include "sample/sample.h"

#include "check.h"
#include "system/kernels.h"

using namespace headrace;
using namespace headrace::test;

namespace {

SampleParams some_params(std::mt19937& rng, int vocab) {
    SampleParams p;
    const auto maybe = [&] { return below(rng, 3) == 0; };
    if (maybe()) p.temperature = static_cast<float>(below(rng, 20)) / 10;
    if (maybe()) p.top_k = 1 + below(rng, 2 * vocab);
    if (maybe()) p.typical_p = 0.7;
    if (maybe()) p.top_p = 0.01 + 0.09 * below(rng, 11);
    if (maybe()) p.min_p = 0.1;
    if (maybe()) p.repetition = 1.3f;
    if (maybe()) p.frequency = 0.5f;
    if (maybe()) p.no_repeat_ngram = 1 + below(rng, 3);
    if (maybe()) p.bias = {{below(rng, vocab), 2.0f}, {below(rng, vocab), -1.0f}};
    if (maybe()) p.bad_words = {{below(rng, vocab)}, {1, below(rng, vocab)}};
    if (maybe()) p.min_tokens = 9, p.stop_ids = {below(rng, vocab)};
    if (maybe()) {
        p.only_allowed = true;
        for (int i = 0; i < 5; ++i) p.allowed.push_back(below(rng, vocab));
    }
    return p;
}

void check(int vocab, std::mt19937& rng) {
    std::normal_distribution<float> normal(0, below(rng, 2) ? 3.0f : 0.3f);
    const int nodes = 5;
    std::vector<float> z(static_cast<size_t>(vocab * (nodes + 1)));
    for (float& value : z) value = normal(rng);
    const std::vector<float> before = z;
    std::vector<uint32_t> mask(static_cast<size_t>((vocab + 31) / 32), 0xffffffff);
    mask[0] &= 0x7fffffff;
    const SampleParams params = some_params(rng, vocab);
    const std::vector<int32_t> prompt{0, below(rng, vocab), below(rng, vocab)}, output{below(rng, vocab), 0};
    History history(prompt);
    history.extend(output);
    const std::vector<int32_t> tokens{0, below(rng, vocab), 0, below(rng, vocab), 0}, parents{-1, -1, 0, 0, 2};
    const std::vector<NoiseKey> keys{{1, 2}, {static_cast<uint32_t>(rng()), 4}};
    std::vector<int32_t> first;
    for (const Isa isa : supported_isas()) {
        Sampler sampler(*kernels_for(isa).sample, vocab);
        std::vector<int32_t> got;
        std::vector<TokenReport> reports;
        const SampleRow row{z.data(), nullptr, &params, &history};
        SampleRow masked = row;
        masked.mask = mask.data();
        for (const SampleRow& each : {row, masked}) {
            const std::string error = sampler.draw(each, keys, {3, true}, reports);
            for (const TokenReport& report : reports) got.push_back(error.empty() ? report.id : -1);
        }
        Walk walk;
        sampler.verify(row, {tokens, parents}, {vocab, 0, 0}, keys[0], {2, false}, walk);
        for (const TokenReport& report : walk.reports) got.push_back(report.id);
        TokenReport report;
        sampler.top(row, 7, report);
        got.insert(got.end(), report.top_ids.begin(), report.top_ids.end());
        sampler.score(row, vocab - 1, 3, report);
        got.push_back(report.rank);
        if (first.empty()) first = got;
        if (got != first) fail("instruction sets draw different tokens");
        if (z != before) fail("logits were not put back");
    }
}

}  // namespace

int main() {
    std::mt19937 rng(3);
    for (const int vocab : {32, 63, 64, 65, 300, 5000}) {
        for (int i = 0; i < 60; ++i) check(vocab, rng);
    }
    std::puts("sample: ok");
    return 0;
}
