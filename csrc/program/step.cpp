#include "program/step.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <span>
#include <stdexcept>

namespace headrace {
namespace {

constexpr size_t kMostNodes = 64;
constexpr const char* kNoMu = "mirostat's mu must be a number";

void require(bool ok, const char* message) {
    if (!ok) throw std::invalid_argument(message);
}

}  // namespace

void Sequence::set_table(size_t table, size_t start, Ids blocks) {
    if (table >= tables.size())
        throw std::out_of_range("a sequence has tables of its tokens, its source and its window layers");
    std::vector<int32_t>& held = tables[table];
    if (start > held.size()) throw std::out_of_range("blocks would leave a gap in the table");
    held.resize(start);
    held.insert(held.end(), blocks.begin(), blocks.end());
}

void Step::clear() {
    for (auto* each : {&ids_, &positions_, &kv_start_, &known_, &tables_, &head_rows_, &nodes_, &parents_, &adapters_})
        each->clear();
    adapted_ = false;
    row_start_.assign(1, 0);
    masks_.clear();
    sequences_.clear();
    asks_.clear();
    answers_.clear();
    combined_.clear();
    first_layer = 0, last_layer = -1;
    hidden = nullptr, hidden_out = nullptr;
    fill = false;
    skips.clear();
    taps.clear();
}

void Step::feed(std::shared_ptr<const Sequence> sequence, int start, int count, Ids nodes, Ids parents, int logits,
                bool full) {
    const std::vector<int32_t>& tokens = sequence->history.tokens();
    const size_t rows = static_cast<size_t>(count) + nodes.size();
    require(start >= 0 && count >= 0 && rows >= 1 &&
                static_cast<size_t>(start) + static_cast<size_t>(count) <= tokens.size(),
            "a feed must name known tokens of its sequence, or have a draft");
    require(nodes.size() == parents.size() && nodes.size() <= kMostNodes,
            "a draft has up to 64 nodes, each with a parent");
    require(logits >= 0 && static_cast<size_t>(logits) <= rows, "a feed has no more rows of logits than rows");
    for (size_t i = 0; i < parents.size(); ++i) {
        require(parents[i] >= -1 && parents[i] < static_cast<int32_t>(i), "a node's parent must come before it");
    }
    const int first_node = start + count;
    if (count > 0) ids_.insert(ids_.end(), tokens.begin() + start, tokens.begin() + first_node);
    ids_.insert(ids_.end(), nodes.begin(), nodes.end());
    for (int i = 0; i < count; ++i) positions_.push_back(start + i);
    masks_.resize(masks_.size() + static_cast<size_t>(count), 0);
    for (size_t i = 0; i < nodes.size(); ++i) {
        const bool root = parents[i] < 0;
        const size_t parent = masks_.size() - i + static_cast<size_t>(root ? 0 : parents[i]);
        positions_.push_back(root ? first_node : positions_[parent] + 1);
        masks_.push_back(uint64_t{1} << i | (root ? 0 : masks_[parent]));
    }
    if (full && !nodes.empty()) {
        std::fill(masks_.end() - static_cast<ptrdiff_t>(nodes.size()), masks_.end(),
                  ~uint64_t{0} >> (64 - nodes.size()));
    }
    adapters_.resize(static_cast<size_t>(this->rows()), sequence->adapter);
    adapted_ = adapted_ || sequence->adapter;
    row_start_.push_back(this->rows());
    kv_start_.push_back(start);
    known_.push_back(count);
    first_head_row_ = static_cast<int>(head_rows_.size());
    for (int row = this->rows() - logits; row < this->rows(); ++row) head_rows_.push_back(row);
    last_known_ = static_cast<int>(head_rows_.size() - nodes.size()) - 1;
    nodes_.assign(nodes.begin(), nodes.end());
    parents_.assign(parents.begin(), parents.end());
    allowed_.reset();
    sequences_.push_back(std::move(sequence));
}

int Step::head_row(int row, int rows) const {
    require(!sequences_.empty(), "there is no feed to ask about");
    require(row >= 0 && row <= static_cast<int>(head_rows_.size()) - first_head_row_ - rows,
            "what is asked for must be rows of logits of the feed");
    return first_head_row_ + row;
}

int Step::ask(Ask ask, int rows) {
    ask.row = head_row(ask.row, rows);
    ask.sequence = sequences_.back();
    ask.allowed = allowed_;
    ask.place = ask.row - last_known_;
    asks_.push_back(std::move(ask));
    return static_cast<int>(asks_.size()) - 1;
}

int Step::draw(int row, std::vector<NoiseKey> keys, Report report, std::optional<double> mu) {
    require(!mu || !std::isnan(*mu), kNoMu);
    Ask question{Ask::Kind::kDraw, row, nullptr, std::move(keys), report};
    question.mu = mu;
    question.path = path_to(row);
    return ask(std::move(question));
}

std::vector<int32_t> Step::path_to(int row) const {
    std::vector<int32_t> path;
    for (int node = head_row(row) - last_known_ - 1; node >= 0 && node < static_cast<int>(nodes_.size());
         node = parents_[static_cast<size_t>(node)]) {
        path.insert(path.begin(), nodes_[static_cast<size_t>(node)]);
    }
    return path;
}

int Step::verify(int row, NoiseKey key, Report report, std::optional<double> mu) {
    require(!mu || !std::isnan(*mu), kNoMu);
    Ask question{Ask::Kind::kVerify, row, nullptr, {key}, report};
    question.mu = mu;
    require(head_row(row) == last_known_, "a draft is verified from the last known token on");
    question.nodes = nodes_, question.parents = parents_;
    return ask(std::move(question), 1 + static_cast<int>(nodes_.size()));
}

int Step::reject(int row, NoiseKey key, std::vector<std::vector<float>> q, bool block, Report report) {
    for (size_t i = 0; i < parents_.size(); ++i) {
        require(parents_[i] == static_cast<int32_t>(i) - 1, "rejection verifies chains");
    }
    require(q.empty() || q.size() == nodes_.size(), "every drafted token needs what it was drawn from");
    const int number = verify(row, key, report, {});
    Ask& question = asks_.back();
    question.kind = Ask::Kind::kReject, question.q = std::move(q), question.block = block;
    return number;
}

int Step::propose(int row, NoiseKey key) {
    Ask question{Ask::Kind::kPropose, row, nullptr, {key}};
    question.path = path_to(row);
    return ask(std::move(question));
}

int Step::top(int row, int k) { return ask({Ask::Kind::kTop, row, nullptr, {}, {}, k}); }

int Step::score(int row, int k, int& count) {
    require(!sequences_.empty() && row >= 0, "there is no such row of a feed to ask about");
    const std::vector<int32_t>& tokens = sequences_.back()->history.tokens();
    const int first = static_cast<int>(asks_.size()), rows = last_known_ - first_head_row_ + 1 - row;
    const size_t next =
        static_cast<size_t>(kv_start_.back() + known_.back() - rows + 1);  // the token after the first row
    count = 0;
    for (; count < rows && next + static_cast<size_t>(count) < tokens.size(); ++count) {
        ask({Ask::Kind::kScore, row + count, nullptr, {}, {}, k, tokens[next + static_cast<size_t>(count)]});
    }
    return first;
}

void Step::combine(int row, Answer& amateur, Rule rule, float alpha, float beta) {
    const int at = head_row(row);
    const std::string problem = amateur.problem();
    require(!problem.empty() || !amateur.logits.empty(), "a row is combined with an answer that has logits");
    require(combined_.empty() || combined_.back().row < at, "rows are combined once, in their order");
    combined_.push_back({at, std::move(amateur.logits), rule, alpha, beta, sequences_.back(), path_to(row), allowed_,
                         at - last_known_});
    if (!problem.empty()) combined_.back().problem = "the amateur model has no answer: " + problem;
}

int Step::logits(int row) { return ask({Ask::Kind::kLogits, row, nullptr}); }

// Copies table `table` of all sequences to `lines` [sequences][width], padded with -1. Returns the width.
int Step::line_up(size_t table, std::vector<int32_t>& lines) const {
    size_t width = 0;
    for (const auto& sequence : sequences_) width = std::max(width, sequence->tables[table].size());
    lines.assign(width * sequences_.size(), -1);
    for (size_t i = 0; i < sequences_.size(); ++i) {
        const std::vector<int32_t>& held = sequences_[i]->tables[table];
        std::copy(held.begin(), held.end(), lines.begin() + static_cast<ptrdiff_t>(i * width));
    }
    return static_cast<int>(width);
}

StepFeeds Step::feeds() {
    const int width = line_up(0, tables_);
    StepFeeds feeds{positions_, masks_, row_start_, kv_start_, known_, tables_, width};
    sources_.clear();
    if (std::any_of(sequences_.begin(), sequences_.end(), [](const auto& each) { return each->source > 0; })) {
        for (const auto& sequence : sequences_) sources_.push_back(sequence->source);
        feeds.source_width = line_up(1, source_tables_);
        feeds.sources = sources_, feeds.source_tables = source_tables_;
    }
    feeds.window_width = line_up(2, window_tables_);
    feeds.window_tables = window_tables_;
    return feeds;
}

StepRows Step::flatten() {
    StepRows rows{ids_, feeds(), head_rows_, {}, {}, skips, first_layer, last_layer, fill, hidden};
    if (adapted_) rows.adapters = adapters_;
    return rows;
}

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void contrast_row(const Combine& pair, std::span<float> z, int shared, const float* maxima, int vocab_size) {
    const size_t words = (static_cast<size_t>(vocab_size) + 31) / 32, place = static_cast<size_t>(pair.place);
    SampleRow row{z.data(), maxima, &pair.sequence->params, &pair.sequence->history, pair.path};
    if (pair.place >= 0 && pair.allowed && pair.allowed->size() >= words * (place + 1)) {
        row.mask = pair.allowed->data() + place * words;
    }
    const float least = best_permitted(row, shared) + std::log(pair.alpha);
    for (int i = 0; i < shared; ++i) {
        z[i] = z[i] < least ? kNever : (1.0f + pair.beta) * z[i] - pair.beta * pair.amateur[static_cast<size_t>(i)];
    }
    std::fill(z.begin() + shared, z.end(), kNever);
}

struct Softmax {
    double best, sum;  // largest logit; sum of exp(logit - best)
    explicit Softmax(std::span<const float> z) : best(*std::max_element(z.begin(), z.end())), sum(0) {
        for (const float logit : z) sum += std::exp(logit - best);
    }
    double of(float logit) const { return std::exp(logit - best) / sum; }
    double most() const { return 1 / sum; }
};

// Whether the rule (kChow, kOpt) selects the amateur's row. The amateur's ids are the first ids of the own vocabulary.
bool stands(const Combine& pair, std::span<const float> own, std::span<const float> amateur) {
    const Softmax q(amateur);
    if (pair.rule == Rule::kChow) return q.most() >= 1 - static_cast<double>(pair.alpha);
    const Softmax p(own);
    double apart = 0;
    for (size_t i = 0; i < own.size(); ++i) {
        apart += std::abs(p.of(own[i]) - (i < amateur.size() ? q.of(amateur[i]) : 0.0));
    }
    return q.most() >= p.most() - static_cast<double>(pair.alpha) * apart / 2;
}

void combine_row(const Combine& pair, const Logits& logits, const SampleKernels& kernels) {
    float* z = logits.values + (pair.row - logits.base) * logits.stride;
    float* maxima = const_cast<float*>(logits.maxima) + (pair.row - logits.base) * logits.maxima_stride;
    const int shared = std::min(logits.vocab_size, static_cast<int>(pair.amateur.size()));
    const std::span own(z, static_cast<size_t>(logits.vocab_size));
    const std::span<const float> amateur(pair.amateur.data(), static_cast<size_t>(shared));
    if (pair.rule == Rule::kContrast) {
        contrast_row(pair, own, shared, maxima, logits.vocab_size);
    } else if (stands(pair, own, amateur)) {
        std::copy(amateur.begin(), amateur.end(), own.begin());
        std::fill(own.begin() + shared, own.end(), kNever);
    } else {
        return;
    }
    kernels.block_maxima(z, logits.vocab_size, maxima);
}

void answer_ask(Sampler& sampler, const Ask& ask, Answer& out, const Logits& logits) {
    for (const Combine& pair : logits.combined) {
        if (pair.row < ask.row || pair.row > ask.last_row()) continue;
        if (pair.failed) throw std::bad_alloc();
        if (!pair.problem.empty()) {
            out.error = pair.problem;
            return;
        }
    }
    static const SampleParams neutral;
    static const History nothing;
    SampleRow row{logits.values + (ask.row - logits.base) * logits.stride,
                  logits.maxima + (ask.row - logits.base) * logits.maxima_stride, &ask.sequence->params,
                  &ask.sequence->history};
    row.mu = ask.mu;
    const size_t words = (static_cast<size_t>(logits.vocab_size) + 31) / 32;
    const bool draws = ask.kind != Ask::Kind::kScore && ask.kind != Ask::Kind::kLogits;
    if (draws && (ask.allowed || row.params->constrained)) {
        const size_t place = static_cast<size_t>(ask.place);
        if (ask.place < 0 || !ask.allowed || ask.allowed->size() < words * (place + 1 + ask.nodes.size())) {
            out.error = "the grammar gave no mask for a token to be drawn";
            return;
        }
        row.mask = ask.allowed->data() + place * words;
    }
    switch (ask.kind) {
        case Ask::Kind::kDraw:
            row.path = ask.path;
            out.error = sampler.draw(row, ask.keys, ask.report, out.reports);
            return;
        case Ask::Kind::kVerify: {
            Walk walk;
            const RowStrides strides{logits.stride, logits.maxima_stride, row.mask ? static_cast<ptrdiff_t>(words) : 0};
            out.error = sampler.verify(row, {ask.nodes, ask.parents}, strides, ask.keys.front(), ask.report, walk);
            out.path = std::move(walk.path);
            out.reports = std::move(walk.reports);
            return;
        }
        case Ask::Kind::kReject: {
            Walk walk;
            const RowStrides strides{logits.stride, logits.maxima_stride, row.mask ? static_cast<ptrdiff_t>(words) : 0};
            out.error = sampler.reject(row, {ask.nodes, ask.q, ask.block}, strides, ask.keys.front(), ask.report, walk);
            out.path = std::move(walk.path);
            out.reports = std::move(walk.reports);
            return;
        }
        case Ask::Kind::kPropose:
            row.path = ask.path;
            out.reports.resize(1);
            out.error = sampler.propose(row, ask.keys.front(), out.reports.front().id, out.logits);
            return;
        case Ask::Kind::kTop:
            row.params = &neutral, row.history = &nothing;
            out.reports.resize(1);
            out.error = sampler.top(row, ask.k, out.reports.front());
            return;
        case Ask::Kind::kScore:
            out.reports.resize(1);
            out.error = sampler.score(row, ask.token, ask.k, out.reports.front());
            return;
        case Ask::Kind::kLogits:
            out.logits.assign(row.logits, row.logits + logits.vocab_size);
            return;
    }
}

}  // namespace

std::vector<int32_t> wanted_units(std::span<const Ask> asks, int first, int last, int vocab_size) {
    const size_t words = (static_cast<size_t>(vocab_size) + 31) / 32;
    constexpr size_t kWords = kVocabBlock / 32;
    std::vector<bool> limited(static_cast<size_t>(last - first)), wanted((words + kWords - 1) / kWords);
    for (const Ask& ask : asks) {
        if (ask.row < first || ask.row >= last) continue;
        const bool draws = ask.kind == Ask::Kind::kDraw || ask.kind == Ask::Kind::kVerify;
        const SampleParams& params = ask.sequence->params;
        // The log-probabilities of the model need all logits of the row.
        const bool whole = ask.report.k >= 0 && !ask.report.processed && !params.masked_logprobs;
        const size_t rows = 1 + ask.nodes.size(), place = static_cast<size_t>(ask.place);
        const bool masked = ask.place >= 0 && ask.allowed && ask.allowed->size() >= words * (place + rows);
        if (!draws || whole || !(masked || params.only_allowed)) return {};
        for (size_t row = 0; row < rows; ++row) {
            limited[static_cast<size_t>(ask.row - first) + row] = true;
            for (size_t word = 0; masked && word < words; ++word) {
                if (ask.allowed->data()[words * (place + row) + word]) wanted[word / kWords] = true;
            }
        }
        if (masked) continue;
        for (const int32_t id : params.allowed) {
            if (id >= 0 && id < vocab_size) wanted[static_cast<size_t>(id) / kVocabBlock] = true;
        }
    }
    if (std::find(limited.begin(), limited.end(), false) != limited.end()) return {};
    std::vector<int32_t> units;
    for (size_t unit = 0; unit < wanted.size(); ++unit) {
        if (wanted[unit]) units.push_back(static_cast<int32_t>(unit));
    }
    return units.size() < wanted.size() ? units : std::vector<int32_t>{};
}

std::string Answer::problem() const {
    if (!failure) return error;
    try {
        std::rethrow_exception(failure);
    } catch (const std::bad_alloc&) {
        return "there was not enough memory to answer; ask for less at once, or give the process more";
    } catch (const std::exception& thrown) {
        return thrown.what();
    }
}

void combine(Combine& pair, const Logits& logits, const SampleKernels& kernels) noexcept {
    if (!pair.problem.empty()) return;
    try {
        combine_row(pair, logits, kernels);
    } catch (...) {
        pair.failed = true;
    }
}

void answer(Sampler& sampler, const Ask& ask, Answer& out, const Logits& logits) noexcept {
    try {
        answer_ask(sampler, ask, out, logits);
    } catch (...) {
        sampler.restore();
        out.failure = std::current_exception();
        out.reports.clear(), out.path.clear(), out.logits.clear();
    }
}

}  // namespace headrace
