// Python bindings of sequences and steps: feeds, asks and answers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "program/step.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using Key = std::pair<uint32_t, uint32_t>;

Rule rule_of(const std::string& name) {
    if (name == "contrast") return Rule::kContrast;
    require(name == "chow" || name == "opt", "rows are combined by contrast, chow or opt");
    return name == "chow" ? Rule::kChow : Rule::kOpt;
}

std::vector<uint32_t> words_of(const nb::bytes& bits) {
    std::vector<uint32_t> words(bits.size() / sizeof(uint32_t));
    if (!words.empty()) std::memcpy(words.data(), bits.data(), words.size() * sizeof(uint32_t));
    return words;
}

Answer& answer_of(Step& step, int number) {
    if (number < 0 || static_cast<size_t>(number) >= step.answers().size()) throw nb::index_error("no such answer");
    return step.answers()[static_cast<size_t>(number)];
}

// Wraps a member function of Step so that it holds an exclusive lock on the step.
template <class R, class... A>
auto alone(R (Step::*method)(A...)) {
    return [method](Step& self, A... arguments) {
        const Exclusive mine(self.in_use);
        return (self.*method)(std::move(arguments)...);
    };
}

// Getter for a part of an answer. It copies the part while it holds a lock, so that no thread changes the answer.
template <class F>
auto part_of_answer(F part) {
    return [part](Step& self, int number) {
        const Shared reader(self.in_use);
        return part(answer_of(self, number));
    };
}

std::vector<int32_t> tokens_of(const Answer& answer) {
    std::vector<int32_t> tokens;
    for (const TokenReport& report : answer.reports) tokens.push_back(report.id);
    return tokens;
}

void draw_each(Step& step, const std::vector<std::shared_ptr<const Sequence>>& sequences,
               const std::vector<int>& starts) {
    const Exclusive mine(step.in_use);
    require(starts.size() == sequences.size(), "a start for each sequence");
    for (size_t i = 0; i < sequences.size(); ++i) {
        require(sequences[i] != nullptr, "no sequence may be missing");
        step.feed(sequences[i], starts[i], 1, {}, {}, 1);
        step.draw(0, {sequences[i]->key}, {}, {});
    }
}

std::vector<int32_t> drawn(Step& step) {
    const Shared reader(step.in_use);
    std::vector<int32_t> tokens;
    for (const Answer& answer : step.answers()) {
        tokens.push_back(answer.error.empty() && !answer.failure && !answer.reports.empty() ? answer.reports.back().id
                                                                                            : -1);
    }
    return tokens;
}

nb::bytes logits_of(const Answer& answer) {
    return nb::bytes(reinterpret_cast<const char*>(answer.logits.data()), answer.logits.size() * sizeof(float));
}

}  // namespace

void bind_step(nb::module_& m) {
    nb::class_<Sequence>(m, "Sequence",
                         "A sequence as a runner knows it: its tokens, its blocks, how its tokens are drawn.")
        .def(
            "__init__",
            [](Sequence* self, const std::vector<int32_t>& prompt, const SampleParams& params, int source,
               int adapter) {
                require(source >= 0 && adapter >= 0, "a source has a number of tokens, an adapter a number");
                new (self) Sequence{History(prompt), params, {}, source, adapter};
            },
            "prompt"_a, "params"_a, "source"_a = 0, "adapter"_a = 0,
            "source: tokens of its source, 0: none. adapter: its number (Program.adapter), 0: none.")
        .def(
            "extend",
            [](Sequence& self, const std::vector<int32_t>& tokens) {
                const Exclusive mine(self.in_use);
                self.history.extend(tokens);
            },
            "tokens"_a)
        .def(
            "set_table",
            [](Sequence& self, size_t table, size_t start, const std::vector<int32_t>& blocks) {
                const Exclusive mine(self.in_use);
                self.set_table(table, start, blocks);
            },
            "table"_a, "start"_a, "blocks"_a,
            "tables[table][start:] = blocks; 0: of its tokens, 1: of its source, 2: of window layers")
        .def_prop_rw(
            "key", [](const Sequence& self) { return Key(self.key.k0, self.key.k1); },
            [](Sequence& self, Key key) {
                const Exclusive mine(self.in_use);
                self.key = {key.first, key.second};
            },
            "The noise key that draw_each draws with.")
        .def("copy", [](const Sequence& self) { return std::make_shared<Sequence>(self); })
        .def_prop_ro("table", [](const Sequence& self) { return self.tables[0]; })
        .def_prop_ro("source_table", [](const Sequence& self) { return self.tables[1]; })
        .def_prop_ro("window_table", [](const Sequence& self) { return self.tables[2]; })
        .def("__len__", [](const Sequence& self) { return self.history.tokens().size(); });
    nb::class_<Step>(m, "Step", "What one step computes and what is asked of it; answers are read after Program.run.")
        .def(nb::init<>())
        .def("clear", alone(&Step::clear))
        .def(
            "feed",
            [](Step& self, std::shared_ptr<const Sequence> sequence, int start, int count, int logits,
               const std::vector<int32_t>& nodes, const std::vector<int32_t>& parents, bool full) {
                const Exclusive mine(self.in_use);
                require(sequence != nullptr, "a feed has a sequence");
                self.feed(std::move(sequence), start, count, nodes, parents, logits, full);
            },
            "sequence"_a, "start"_a, "count"_a, "logits"_a = 0, "nodes"_a = std::vector<int32_t>{},
            "parents"_a = std::vector<int32_t>{}, "full"_a = false)
        .def(
            "mask",
            [](Step& self, const nb::bytes& bits) {
                const Exclusive mine(self.in_use);
                self.mask(words_of(bits));
            },
            "bits"_a,
            "What may be drawn after the feed added last: 32-bit words, a bit per token, for its last known token and "
            "each node.")
        .def(
            "draw",
            [](Step& self, int row, const std::vector<Key>& keys, int logprobs, bool processed,
               std::optional<double> mu) {
                const Exclusive mine(self.in_use);
                std::vector<NoiseKey> all;
                for (const auto& [k0, k1] : keys) all.push_back({k0, k1});
                return self.draw(row, std::move(all), {logprobs, processed}, mu);
            },
            "row"_a, "keys"_a, "logprobs"_a = -1, "processed"_a = false, "mu"_a = nb::none())
        .def("draw_each", &draw_each, "sequences"_a, "starts"_a,
             "Feed each sequence its known token at a start, and draw one token after it with its key; sequence i is "
             "answer i.")
        .def("drawn", &drawn, "The tokens that `draw_each` asked for; -1 where `error` says why there is none.")
        .def(
            "verify",
            [](Step& self, int row, Key key, int logprobs, bool processed, std::optional<double> mu) {
                const Exclusive mine(self.in_use);
                return self.verify(row, {key.first, key.second}, {logprobs, processed}, mu);
            },
            "row"_a, "key"_a, "logprobs"_a = -1, "processed"_a = false, "mu"_a = nb::none())
        .def(
            "reject",
            [](Step& self, int row, Key key, const std::vector<nb::bytes>& q, bool block, int logprobs,
               bool processed) {
                const Exclusive mine(self.in_use);
                std::vector<std::vector<float>> rows;
                for (const nb::bytes& each : q) {
                    rows.emplace_back(each.size() / sizeof(float));
                    std::memcpy(rows.back().data(), each.c_str(), rows.back().size() * sizeof(float));
                }
                return self.reject(row, {key.first, key.second}, std::move(rows), block, {logprobs, processed});
            },
            "row"_a, "key"_a, "q"_a, "block"_a = false, "logprobs"_a = -1, "processed"_a = false,
            "Verify a chain by rejection. q: float32 bytes for each drafted token; empty: they were chosen, not drawn.")
        .def(
            "propose",
            [](Step& self, int row, Key key) {
                const Exclusive mine(self.in_use);
                return self.propose(row, {key.first, key.second});
            },
            "row"_a, "key"_a, "A token for a draft; its row of logits are then the probabilities it was drawn from.")
        .def("top", alone(&Step::top), "row"_a, "k"_a)
        .def(
            "score",
            [](Step& self, int row, int k) {
                const Exclusive mine(self.in_use);
                int count = 0;
                const int first = self.score(row, k, count);
                return std::pair(first, count);
            },
            "row"_a, "k"_a, "Every row from `row` on scores the known token after it -> first answer, how many.")
        .def("logits", alone(&Step::logits), "row"_a)
        .def(
            "combine",
            [](Step& self, int row, Step& amateur, int answer, const std::string& rule, float alpha, float beta) {
                require(&self != &amateur, "a step is not combined with itself");
                const Exclusive mine(self.in_use), its(amateur.in_use);
                self.combine(row, answer_of(amateur, answer), rule_of(rule), alpha, beta);
            },
            "row"_a, "amateur"_a, "answer"_a, "rule"_a, "alpha"_a, "beta"_a,
            "Combine a row of logits with those that another step answered, which are taken from it, by contrast, chow "
            "or "
            "opt. An error of that answer becomes the error of all that is asked about the row.")
        .def_prop_ro("rows", &Step::rows)
        .def("tokens", part_of_answer(&tokens_of), "answer"_a)
        .def("reports", part_of_answer([](const Answer& answer) { return answer.reports; }), "answer"_a)
        .def("path", part_of_answer([](const Answer& answer) { return answer.path; }), "answer"_a)
        .def("row_of_logits", part_of_answer(&logits_of), "answer"_a, "float32 bytes")
        .def("error", part_of_answer([](const Answer& answer) { return answer.problem(); }), "answer"_a);
}

}  // namespace headrace
