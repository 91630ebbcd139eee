// Python bindings of the sampler: parameters and histories of sequences, and calls on rows of logits.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind/bind.h"
#include "sample/sample.h"
#include "system/in_use.h"
#include "system/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using Row = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstRow = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Masks = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int32s = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = std::vector<std::pair<uint32_t, uint32_t>>;

const SampleKernels& kernels_named(const std::optional<std::string>& isa) {
    return *(isa ? kernels_for(parse_isa(*isa)) : kernels()).sample;
}

std::vector<NoiseKey> keys_of(const Keys& pairs) {
    std::vector<NoiseKey> keys;
    for (const auto& [k0, k1] : pairs) keys.push_back({k0, k1});
    return keys;
}

void check(bool ok, const char* message) {
    if (!ok) throw nb::value_error(message);
}

// Python wrapper of the sampler of one thread for one vocabulary.
class PySampler {
public:
    PySampler(int vocab_size, const std::optional<std::string>& isa)
        : size_((check(vocab_size > 0, "vocab_size must be positive"), vocab_size)),
          sampler_(kernels_named(isa), vocab_size) {}

    std::pair<std::vector<TokenReport>, std::string> draw(const Row& logits, const SampleParams& params,
                                                          const History& history, const Keys& keys,
                                                          const std::vector<int32_t>& path, int logprobs,
                                                          bool processed, uint32_t purpose,
                                                          const std::optional<ConstRow>& maxima,
                                                          const std::optional<Mask>& mask, std::optional<double> mu) {
        SampleRow row{logits.data(), maxima_of(maxima), &params, &history, path, nullptr, mu};
        const Exclusive mine(in_use_);
        check(logits.size() == static_cast<size_t>(size_), "logits must have one value per token");
        if (mask) check(mask->size() * 32 >= static_cast<size_t>(size_), "mask must have one bit per token");
        check(!mu || !std::isnan(*mu), "mirostat's mu must be a number");
        if (mask) row.mask = mask->data();
        const std::vector<NoiseKey> all = keys_of(keys);
        std::vector<TokenReport> out;
        const nb::gil_scoped_release unlocked;
        std::string error = sampler_.draw(row, all, {logprobs, processed}, out, purpose);
        return {std::move(out), std::move(error)};
    }

    std::tuple<std::vector<int32_t>, std::vector<TokenReport>, std::string> verify(
        const Rows& logits, const SampleParams& params, const History& history, std::pair<uint32_t, uint32_t> key,
        const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents, int logprobs, bool processed,
        const std::optional<ConstRows>& maxima, const std::optional<Masks>& masks, std::optional<double> mu) {
        const Exclusive mine(in_use_);
        check(logits.shape(1) == static_cast<size_t>(size_), "logits must have one value per token");
        check(tokens.size() == parents.size() && logits.shape(0) == tokens.size() + 1,
              "logits must have one row more than the draft has nodes, and every node a parent");
        for (size_t i = 0; i < parents.size(); ++i) {
            check(parents[i] >= -1 && parents[i] < static_cast<int32_t>(i), "a node's parent must come before it");
        }
        check(!mu || !std::isnan(*mu), "mirostat's mu must be a number");
        SampleRow row{logits.data(), nullptr, &params, &history, {}, nullptr, mu};
        RowStrides strides{static_cast<ptrdiff_t>(size_), 0, 0};
        if (maxima) {
            check(maxima->shape(0) == logits.shape(0) && maxima->shape(1) == blocks(), "maxima do not fit the logits");
            row.maxima = maxima->data();
            strides.maxima = static_cast<ptrdiff_t>(blocks());
        }
        if (masks) {
            check(masks->shape(0) == logits.shape(0) && masks->shape(1) * 32 >= static_cast<size_t>(size_),
                  "masks must have one bit per token");
            row.mask = masks->data();
            strides.mask = static_cast<ptrdiff_t>(masks->shape(1));
        }
        Walk walk;
        const nb::gil_scoped_release unlocked;
        std::string error =
            sampler_.verify(row, {tokens, parents}, strides, {key.first, key.second}, {logprobs, processed}, walk);
        return {std::move(walk.path), std::move(walk.reports), std::move(error)};
    }

    std::tuple<std::vector<int32_t>, std::vector<TokenReport>, std::string> reject(
        const Rows& logits, const SampleParams& params, const History& history, std::pair<uint32_t, uint32_t> key,
        const std::vector<int32_t>& tokens, const std::optional<ConstRows>& q, bool block, int logprobs,
        bool processed) {
        const Exclusive mine(in_use_);
        check(logits.shape(1) == static_cast<size_t>(size_) && logits.shape(0) == tokens.size() + 1,
              "logits must have one value per token, and one row more than the chain has tokens");
        std::vector<std::vector<float>> rows;
        if (q) {
            check(q->shape(0) == tokens.size(), "every drafted token needs a row of q");
            for (size_t i = 0; i < tokens.size(); ++i) {
                const float* row = q->data() + i * q->shape(1);
                rows.emplace_back(row, row + q->shape(1));
            }
        }
        const SampleRow row{logits.data(), nullptr, &params, &history};
        Walk walk;
        const nb::gil_scoped_release unlocked;
        std::string error = sampler_.reject(row, {tokens, rows, block}, {static_cast<ptrdiff_t>(size_), 0, 0},
                                            {key.first, key.second}, {logprobs, processed}, walk);
        return {std::move(walk.path), std::move(walk.reports), std::move(error)};
    }

    std::tuple<int32_t, std::vector<float>, std::string> propose(const Row& logits, const SampleParams& params,
                                                                 const History& history,
                                                                 std::pair<uint32_t, uint32_t> key,
                                                                 const std::vector<int32_t>& path) {
        const Exclusive mine(in_use_);
        check(logits.size() == static_cast<size_t>(size_), "logits must have one value per token");
        const SampleRow row{logits.data(), nullptr, &params, &history, path};
        int32_t token = -1;
        std::vector<float> q;
        std::string error = sampler_.propose(row, {key.first, key.second}, token, q);
        return {token, std::move(q), std::move(error)};
    }

    std::pair<TokenReport, std::string> top(const Row& logits, int k, const SampleParams* params,
                                            const History* history, const std::optional<ConstRow>& maxima) {
        const Exclusive mine(in_use_);
        check(logits.size() == static_cast<size_t>(size_), "logits must have one value per token");
        check((params == nullptr) == (history == nullptr), "params and history go together");
        const SampleParams neutral;
        const History none;
        const SampleRow row{logits.data(), maxima_of(maxima), params ? params : &neutral, history ? history : &none};
        TokenReport report;
        const nb::gil_scoped_release unlocked;
        std::string error = sampler_.top(row, k, report);
        return {std::move(report), std::move(error)};
    }

    std::pair<std::vector<TokenReport>, std::string> score(const Rows& logits, const Int32s& tokens, int k) {
        const Exclusive mine(in_use_);
        check(logits.shape(1) == static_cast<size_t>(size_), "logits must have one value per token");
        check(tokens.size() == logits.shape(0), "one token per row of logits");
        std::vector<TokenReport> out(tokens.size());
        std::string error;
        const nb::gil_scoped_release unlocked;
        for (size_t i = 0; i < out.size() && error.empty(); ++i) {
            const SampleRow row{logits.data() + i * static_cast<size_t>(size_), nullptr, nullptr, nullptr};
            error = sampler_.score(row, tokens.data()[i], k, out[i]);
        }
        return {std::move(out), std::move(error)};
    }

private:
    size_t blocks() const { return static_cast<size_t>((size_ + kVocabBlock - 1) / kVocabBlock); }
    const float* maxima_of(const std::optional<ConstRow>& maxima) const {
        if (maxima) check(maxima->size() == blocks(), "maxima must have one value per block of tokens");
        return maxima ? maxima->data() : nullptr;
    }

    const int size_;
    Sampler sampler_;
    InUse in_use_;
};

void gumbel_words(const Words& words, const Row& out, const std::optional<std::string>& isa) {
    check(words.size() == out.size(), "words and out must have the same length");
    kernels_named(isa).gumbel_words(words.data(), static_cast<int>(words.size()), out.data());
}

void gumbel_row(std::pair<uint32_t, uint32_t> key, uint32_t position, const Row& out, uint32_t purpose,
                const std::optional<std::string>& isa) {
    kernels_named(isa).gumbel_row(static_cast<int>(out.size()), {{key.first, key.second}, position, purpose},
                                  out.data());
}

void gumbel_ids(std::pair<uint32_t, uint32_t> key, uint32_t position, const Int32s& ids, const Row& out,
                uint32_t purpose, const std::optional<std::string>& isa) {
    check(ids.size() == out.size(), "ids and out must have the same length");
    kernels_named(isa).gumbel(ids.data(), static_cast<int>(ids.size()), {{key.first, key.second}, position, purpose},
                              out.data());
}

bool block_maxima(const ConstRow& logits, const Row& out, const std::optional<std::string>& isa) {
    check(out.size() == (logits.size() + kVocabBlock - 1) / kVocabBlock, "out must have one value per block of tokens");
    return kernels_named(isa).block_maxima(logits.data(), static_cast<int>(logits.size()), out.data());
}

}  // namespace

void bind_sample(nb::module_& m) {
    m.attr("VOCAB_BLOCK") = kVocabBlock;
    nb::class_<SampleParams>(m, "SampleParams", "What decides which token comes; neutral when made.")
        .def(nb::init<>())
        .def_rw("temperature", &SampleParams::temperature)
        .def_rw("top_k", &SampleParams::top_k)
        .def_rw("typical_p", &SampleParams::typical_p)
        .def_rw("top_p", &SampleParams::top_p)
        .def_rw("min_p", &SampleParams::min_p)
        .def_rw("repetition_penalty", &SampleParams::repetition)
        .def_rw("frequency_penalty", &SampleParams::frequency)
        .def_rw("presence_penalty", &SampleParams::presence)
        .def_rw("no_repeat_ngram", &SampleParams::no_repeat_ngram)
        .def_rw("dry_multiplier", &SampleParams::dry_multiplier)
        .def_rw("dry_base", &SampleParams::dry_base)
        .def_rw("dry_allowed_length", &SampleParams::dry_allowed_length)
        .def_rw("dry_range", &SampleParams::dry_range)
        .def_rw("dry_breakers", &SampleParams::dry_breakers)
        .def_rw("top_n_sigma", &SampleParams::top_n_sigma)
        .def_rw("xtc_probability", &SampleParams::xtc_probability)
        .def_rw("xtc_threshold", &SampleParams::xtc_threshold)
        .def_rw("mirostat_tau", &SampleParams::mirostat_tau)
        .def_rw("mirostat_eta", &SampleParams::mirostat_eta)
        .def_rw("min_tokens", &SampleParams::min_tokens)
        .def_rw("logit_bias", &SampleParams::bias, "List of (token id, bias).")
        .def_rw("bad_words", &SampleParams::bad_words)
        .def_rw("stop_ids", &SampleParams::stop_ids)
        .def_rw("constrained", &SampleParams::constrained)
        .def_rw("mass_from", &SampleParams::mass_from)
        .def_rw("masked_logprobs", &SampleParams::masked_logprobs)
        .def_prop_rw(
            "allowed", [](const SampleParams& p) { return p.only_allowed ? std::optional(p.allowed) : std::nullopt; },
            [](SampleParams& p, std::optional<std::vector<int32_t>> ids) {
                p.only_allowed = ids.has_value();
                p.allowed = std::move(ids).value_or(std::vector<int32_t>{});
            },
            nb::arg().none());
    nb::class_<History>(m, "History", "The tokens of a sequence, and how often each is in its output.")
        .def(
            "__init__", [](History* self, const std::vector<int32_t>& prompt) { new (self) History(prompt); },
            "prompt"_a)
        .def(
            "extend", [](History& self, const std::vector<int32_t>& output) { self.extend(output); }, "output"_a)
        .def("copy", [](const History& self) { return History(self); })
        .def("__len__", [](const History& self) { return self.tokens().size(); });
    nb::class_<TokenReport>(m, "TokenReport")
        .def_ro("id", &TokenReport::id)
        .def_ro("logprob", &TokenReport::logprob)
        .def_ro("rank", &TokenReport::rank)
        .def_ro("mu", &TokenReport::mu)
        .def_ro("top_ids", &TokenReport::top_ids)
        .def_ro("top_logprobs", &TokenReport::top_logprobs);
    nb::class_<PySampler>(m, "Sampler", "Draws, verifies and scores on rows of float32 logits; one per thread.")
        .def(nb::init<int, const std::optional<std::string>&>(), "vocab_size"_a, "isa"_a = nb::none())
        .def("draw", &PySampler::draw, "logits"_a.noconvert(), "params"_a, "history"_a, "keys"_a,
             "path"_a = std::vector<int32_t>{}, "logprobs"_a = -1, "processed"_a = false,
             "purpose"_a = Sampler::kTarget, "maxima"_a = nb::none(), "mask"_a = nb::none(), "mu"_a = nb::none(),
             "One token per key from logits [V] -> (reports, error). The logits are put back as they were.")
        .def("verify", &PySampler::verify, "logits"_a.noconvert(), "params"_a, "history"_a, "key"_a, "tokens"_a,
             "parents"_a, "logprobs"_a = -1, "processed"_a = false, "maxima"_a = nb::none(), "masks"_a = nb::none(),
             "mu"_a = nb::none(),
             "Walk a draft tree: logits [1 + nodes, V] -> (path, reports of the drawn tokens, error).")
        .def("reject", &PySampler::reject, "logits"_a.noconvert(), "params"_a, "history"_a, "key"_a, "tokens"_a,
             "q"_a = nb::none(), "block"_a = false, "logprobs"_a = -1, "processed"_a = false,
             "Verify a chain by rejection: logits [1 + tokens, V], q [tokens, V] -> (path, reports of the tokens, "
             "error).")
        .def("propose", &PySampler::propose, "logits"_a.noconvert(), "params"_a, "history"_a, "key"_a,
             "path"_a = std::vector<int32_t>{},
             "A drafted token from logits [V], and what from -> (token, q [V], error).")
        .def("top", &PySampler::top, "logits"_a.noconvert(), "k"_a, "params"_a.none() = nb::none(),
             "history"_a.none() = nb::none(), "maxima"_a = nb::none(),
             "The k best tokens of logits [V] after biases, bans and penalties -> (report, error).")
        .def("score", &PySampler::score, "logits"_a.noconvert(), "tokens"_a, "k"_a = 0,
             "Log-probabilities of given tokens [n] under logits [n, V] -> (reports, error).");
    m.def("gumbel_words", &gumbel_words, "words"_a, "out"_a.noconvert(), "isa"_a = nb::none(),
          "Noise of 32-bit words.");
    m.def("gumbel_row", &gumbel_row, "key"_a, "position"_a, "out"_a.noconvert(), "purpose"_a = 0, "isa"_a = nb::none(),
          "Noise of the token ids 0 .. len(out) - 1.");
    m.def("gumbel_ids", &gumbel_ids, "key"_a, "position"_a, "ids"_a, "out"_a.noconvert(), "purpose"_a = 0,
          "isa"_a = nb::none(), "Noise of given token ids.");
    m.def("block_maxima", &block_maxima, "logits"_a, "out"_a.noconvert(), "isa"_a = nb::none(),
          "The largest of every block of VOCAB_BLOCK logits; False where one is NaN.");
}

}  // namespace headrace
