// Tests of reference hashes (bits.txt): norms, converted rows, activations, packed floats, noise, drawn tokens,
// low-rank products.
#include "bits.h"

#include <bit>
#include <optional>

#include "linear/quantize_act_kernels.h"
#include "low_rank/kernels.h"
#include "pack/pack.h"
#include "sample/sample.h"
#include "system/kernels.h"

using namespace headrace;
using namespace headrace::test;

namespace {

constexpr int kRows = 3, kColumns = 321;

// Input rows, and weights and biases of a norm.
struct Input {
    std::vector<float> x, weight, bias;

    explicit Input(unsigned seed) {
        std::mt19937 rng(seed);
        x = even_floats(rng, kRows * kColumns);
        weight = even_floats(rng, kColumns);
        bias = even_floats(rng, kColumns);
    }
    Norm norm(NormKind kind) const { return {kind, weight.data(), bias.data(), 1e-5f}; }
};

uint64_t norms(const Input& in, NormKind kind, Isa isa) {
    std::vector<float> out(in.x.size());
    kernels_for(isa).quantize->norm(in.x.data(), kColumns, 0, kRows, kColumns, in.norm(kind), out.data(), kColumns);
    return Hash().add(out).value();
}

uint64_t rounded(const Input& in, Rounding rounding, Isa isa) {
    std::vector<uint8_t> memory(a8_bytes(kRows, kColumns, rounding));
    const A8 a8 = a8_at(memory.data(), kRows, kColumns, rounding, rounding == Rounding::kTensor ? 0.05f : 7.5f);
    std::vector<float> scratch(kColumns);
    const Norm norm = in.norm(NormKind::kNone);
    kernels_for(isa).quantize->to_a8(in.x.data(), kColumns, 0, kRows, kColumns, norm, scratch.data(), a8);
    Hash hash;
    hash.add(a8.blocks, static_cast<size_t>(kRows) * a8.tiles);
    for (int row = 0; a8.outliers && row < kRows; ++row) {  // entries past the count are not written
        const Outliers& out = a8.outliers[row];
        const auto count = static_cast<size_t>(out.count);
        hash.add(&out.count, 1).add(out.column, count).add(out.value, count);
    }
    return hash.value();
}

uint64_t bfloats(const Input& in, Isa isa) {
    std::vector<uint16_t> out(kRows * 384);
    std::vector<float> scratch(kColumns);
    const Norm norm = in.norm(NormKind::kRms);
    kernels_for(isa).quantize->to_bf16(in.x.data(), kColumns, 0, kRows, kColumns, norm, scratch.data(),
                                       {out.data(), 384});
    return Hash().add(out).value();
}

uint64_t activated(const Input& in, Activation kind, Isa isa) {
    std::vector<float> out(in.x.size()), gated(in.x.size());
    const QuantizeKernels& kernels = *kernels_for(isa).quantize;
    const auto count = static_cast<int64_t>(in.x.size());
    kernels.act(kind, in.x.data(), count, out.data());
    kernels.act_mul(kind, in.x.data(), out.data(), count, gated.data());
    return Hash().add(out).add(gated).value();
}

// Hash of floats packed as bfloat16, "int8" or "int4" and unpacked.
uint64_t packed(const Input& in, const char* quantize, Isa isa) {
    constexpr int kWidth = 320;
    ThreadPool pool(1);
    Arena arena(size_t{1} << 21);
    const PackedKind kind = packed_kind(SourceKind::kF32, quantize);
    const auto* rows = reinterpret_cast<const uint8_t*>(in.x.data());
    const PackRequest request{{rows, kColumns * 4, SourceKind::kF32, nullptr}, kind, kRows, kWidth};
    const PackedTensor tensor = pack_tensor(request, kernels_for(isa), arena, pool);
    Hash hash;
    std::vector<float> row(kWidth);
    for (int i = 0; i < kRows; ++i) {
        kernels_for(isa).pack->unpack(tensor, i, row.data());
        hash.add(row);
    }
    return hash.value();
}

// Low-rank products of a row: of 7 ranks, with columns left over by every width of vectors.
uint64_t low_rank(const Input& in, Isa isa) {
    constexpr int kRank = 7, kOut = 150;
    std::mt19937 rng(23);
    const auto bfloat16 = [&](size_t count) {
        std::vector<uint16_t> found;
        for (const float value : even_floats(rng, count)) found.push_back(std::bit_cast<uint32_t>(value) >> 16);
        return found;
    };
    const std::vector<uint16_t> down = bfloat16(kRank * kColumns), up = bfloat16(kRank * kOut);
    std::vector<float> x(in.x.begin(), in.x.begin() + kColumns), low(kRank),
        out(in.weight.begin(), in.weight.begin() + kOut);
    for (float& value : x) value /= 3.0f;  // so that sums are rounded
    kernels_for(isa).low_rank->down(low.data(), down.data(), x.data(), kColumns, kRank);
    kernels_for(isa).low_rank->up(out.data(), up.data(), kOut, low.data(), kRank, kOut);
    return Hash().add(low).add(out).value();
}

uint64_t noise(uint32_t purpose, Isa isa) {
    std::vector<float> out(1000);
    kernels_for(isa).sample->gumbel_row(1000, {{7, 11}, 13, purpose}, out.data());
    return Hash().add(out).value();
}

// Hash of the tokens drawn from a row with ten keys.
uint64_t drawn(const SampleParams& params, Isa isa) {
    constexpr int kVocab = 1000;
    std::mt19937 rng(17);
    std::vector<float> logits = even_floats(rng, kVocab);
    const std::vector<int32_t> prompt{1, 2, 3}, output{4, 2};
    History history(prompt);
    history.extend(output);
    std::vector<NoiseKey> keys;
    for (uint32_t i = 0; i < 10; ++i) keys.push_back({i, 99});
    std::vector<TokenReport> reports;
    Sampler sampler(*kernels_for(isa).sample, kVocab);
    require(sampler.draw({logits.data(), nullptr, &params, &history}, keys, {}, reports).empty(), "a row is not drawn");
    std::vector<int32_t> ids;
    for (const TokenReport& report : reports) ids.push_back(report.id);
    return Hash().add(ids).value();
}

std::vector<SampleParams> settings() {
    std::vector<SampleParams> found(6);
    found[1].temperature = 0.0f;
    found[2].temperature = 2.5f, found[2].top_k = 50, found[2].repetition = 1.3f;
    found[3].temperature = 4.0f, found[3].top_p = 0.9, found[3].frequency = 0.5f;
    found[4].temperature = 4.0f, found[4].min_p = 0.05, found[4].no_repeat_ngram = 2;
    found[5].temperature = 4.0f, found[5].typical_p = 0.7, found[5].bias = {{5, 3.0f}};
    return found;
}

}  // namespace

int main() {
    Bits bits;
    const Input in(1), other(2);
    for (const int kind : {1, 2})
        bits.compare("norm", kind, [&](Isa isa) { return norms(in, static_cast<NormKind>(kind), isa); });
    for (const int kind : {0, 1, 2})
        bits.compare("activation", kind, [&](Isa isa) { return activated(in, static_cast<Activation>(kind), isa); });
    for (const int kind : {0, 1, 2, 3})
        bits.compare("rounded", kind, [&](Isa isa) { return rounded(in, static_cast<Rounding>(kind), isa); });
    bits.compare("low_rank", 0, [&](Isa isa) { return low_rank(in, isa); });
    bits.compare("bfloat16", 0, [&](Isa isa) { return bfloats(in, isa); });
    int number = 0;
    for (const char* quantize : {"", "int8", "int4"})
        bits.compare("packed", number++, [&](Isa isa) { return packed(in, quantize, isa); });
    for (const uint32_t purpose : {Sampler::kTarget, Sampler::kDraft})
        bits.compare("noise", static_cast<int>(purpose), [&](Isa isa) { return noise(purpose, isa); });
    const std::vector<SampleParams> params = settings();
    for (size_t i = 0; i < params.size(); ++i)
        bits.compare("drawn", static_cast<int>(i), [&](Isa isa) { return drawn(params[i], isa); });
    bits.finish();
    for (const Isa isa : supported_isas()) {
        require(!bits.holds("norm", 1, norms(other, NormKind::kRms, isa)), "the control: other rows, the same bits");
        require(!bits.holds("noise", 0, noise(9, isa)), "the control: another purpose, the same noise");
    }
    std::puts("bits: ok");
    return 0;
}
