#include "sample/edits.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <unordered_map>

namespace headrace {
namespace {

constexpr float kLargest = 1e30f;  // larger logits are an error; up to this size no later stage overflows
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr double kPoint = 0x1p40;

std::vector<int32_t> joined(const SampleRow& row) {
    std::vector<int32_t> tokens = row.history->tokens();
    tokens.insert(tokens.end(), row.path.begin(), row.path.end());
    return tokens;
}

// Appends the ids that as the next token would complete a word (a sequence of tokens).
void completed_words(const std::vector<int32_t>& tokens, const std::vector<std::vector<int32_t>>& words,
                     std::vector<int32_t>& out) {
    for (const std::vector<int32_t>& word : words) {
        const size_t start = word.size() - 1;
        if (tokens.size() >= start &&
            std::equal(word.begin(), word.end() - 1, tokens.end() - static_cast<long>(start))) {
            out.push_back(word.back());
        }
    }
}

// Appends the ids that as the next token would repeat an n-gram of `tokens`.
void repeated_ngrams(const std::vector<int32_t>& tokens, int n, std::vector<int32_t>& out) {
    const int starts = static_cast<int>(tokens.size()) - n + 1;
    if (starts < 1) return;
    const auto tail = tokens.end() - (n - 1);
    for (int i = 0; i < starts; ++i) {
        if (std::equal(tail, tokens.end(), tokens.begin() + i)) out.push_back(tokens[static_cast<size_t>(i + n - 1)]);
    }
}

std::vector<int32_t> banned(const SampleRow& row) {
    const SampleParams& params = *row.params;
    std::vector<int32_t> out;
    if (row.position() - row.history->prompt_length() < params.min_tokens) out = params.stop_ids;
    if (params.bad_words.empty() && params.no_repeat_ngram < 1) return out;
    const std::vector<int32_t> tokens = joined(row);
    completed_words(tokens, params.bad_words, out);
    if (params.no_repeat_ngram > 0) repeated_ngrams(tokens, params.no_repeat_ngram, out);
    return out;
}

// DRY penalty of each token that would continue a repetition. See headrace.ops.penalties.dry.
std::unordered_map<int32_t, float> dry_costs(const SampleRow& row) {
    constexpr int kLongest = 64;
    constexpr double kDearest = 1e4;
    const SampleParams& params = *row.params;
    const std::vector<int32_t> all = joined(row);
    const size_t range = static_cast<size_t>(params.dry_range);
    const Ids tokens = Ids(all).subspan(range && range < all.size() ? all.size() - range : 0);
    const auto breaks = [&](int32_t id) {
        return std::find(params.dry_breakers.begin(), params.dry_breakers.end(), id) != params.dry_breakers.end();
    };
    std::unordered_map<int32_t, float> costs;
    if (tokens.empty() || breaks(tokens.back())) return costs;
    std::unordered_map<int32_t, int> longest;  // next token -> length of the longest repetition
    const int last = static_cast<int>(tokens.size()) - 1;
    for (int end = 0; end < last; ++end) {
        const int32_t next = tokens[static_cast<size_t>(end) + 1];
        if (tokens[static_cast<size_t>(end)] != tokens[static_cast<size_t>(last)] || breaks(next)) continue;
        int length = 1;
        for (; length < kLongest && length <= end; ++length) {
            const int32_t before = tokens[static_cast<size_t>(last - length)];
            if (tokens[static_cast<size_t>(end - length)] != before || breaks(before)) break;
        }
        int& most = longest[next];
        most = std::max(most, length);
    }
    for (const auto& [next, length] : longest) {
        if (length < params.dry_allowed_length) continue;
        double cost = params.dry_multiplier;
        for (int i = params.dry_allowed_length; i < length; ++i) cost = std::min(cost * params.dry_base, kDearest);
        costs[next] = static_cast<float>(cost);
    }
    return costs;
}

float penalised(float z, const SampleParams& params, int count) {
    if (params.repetition != 1.0f) z = z > 0 ? z / params.repetition : z * params.repetition;
    if (params.frequency != 0.0f || params.presence != 0.0f) {
        z -= params.frequency * static_cast<float>(count) + params.presence * (count > 0 ? 1.0f : 0.0f);
    }
    return z;
}

}  // namespace

History::History(Ids prompt) : tokens_(prompt.begin(), prompt.end()), prompt_length_(static_cast<int>(prompt.size())) {
    for (const int32_t id : prompt) counts_.try_emplace(id, 0);
}

void History::extend(Ids output) {
    tokens_.insert(tokens_.end(), output.begin(), output.end());
    for (const int32_t id : output) ++counts_[id];
}

RowEdits::RowEdits(const SampleKernels& kernels, int vocab_size)
    : kernels_(kernels), size_(vocab_size), blocks_((vocab_size + kVocabBlock - 1) / kVocabBlock) {}

std::string RowEdits::open(const SampleRow& row) {
    row_ = row.logits;
    raw_maxima_ = row.maxima;
    changed_ = false;
    bool numbers = true;
    if (!raw_maxima_) {
        found_.resize(static_cast<size_t>(blocks_));
        numbers = kernels_.block_maxima(row_, size_, found_.data());
        raw_maxima_ = found_.data();
    } else {
        numbers = std::none_of(raw_maxima_, raw_maxima_ + blocks_, [](float x) { return std::isnan(x); });
    }
    const float best = raw_maxima_[kernels_.argmax(raw_maxima_, blocks_)];
    if (numbers && std::abs(best) <= kLargest) return "";
    std::ostringstream text;
    text << "the model's logits are broken: the largest is " << (numbers ? best : std::nanf(""));
    return text.str();
}

std::string RowEdits::unknown_id(const SampleRow& row) const {
    int32_t wrong = 0;
    const auto check = [&](int32_t id) { wrong = id < 0 || id >= size_ ? id : wrong; };
    const SampleParams& params = *row.params;
    for (const auto& [id, value] : params.bias) check(id);
    for (const int32_t id : params.allowed) check(id);
    for (const std::vector<int32_t>& word : params.bad_words) std::for_each(word.begin(), word.end(), check);
    if (params.min_tokens) std::for_each(params.stop_ids.begin(), params.stop_ids.end(), check);
    std::for_each(row.path.begin(), row.path.end(), check);
    if (params.penalties()) {
        for (const auto& [id, count] : row.history->counts()) check(id);
    } else if (params.no_repeat_ngram || params.dry_multiplier > 0) {
        std::for_each(row.history->tokens().begin(), row.history->tokens().end(), check);
    }
    if (!wrong) return "";
    return "token id " + std::to_string(wrong) + " is outside the vocabulary of " + std::to_string(size_);
}

std::string RowEdits::apply(const SampleRow& row) {
    std::string error = unknown_id(row);
    if (!error.empty()) return error;
    const SampleParams& params = *row.params;
    const std::vector<int32_t> never = banned(row);
    const bool masked = params.only_allowed || row.mask || params.mass_from >= 0;
    const bool dry = params.dry_multiplier > 0;
    if (!masked && params.bias.empty() && never.empty() && !params.penalties() && !dry) return "";
    begin();
    if (masked) allow(row);
    for (const auto& [id, value] : params.bias) set(id, z_[id] + value);
    for (const int32_t id : never) set(id, kNever);
    if (params.penalties()) penalise(row);
    if (dry) {
        for (const auto& [id, cost] : dry_costs(row)) set(id, z_[id] - cost);
    }
    refresh();
    if (params.mass_from >= 0) compare_mass(std::min(params.mass_from, size_));
    return "";
}

void RowEdits::begin() {
    changed_ = true;
    z_ = row_;
    edits_.clear();
    touched_.clear();
    maxima_.assign(raw_maxima_, raw_maxima_ + blocks_);
}

// Copies the allowed logits to masked_. Blocks without an allowed id keep a maximum of -inf, so they are never read and
// need no values.
void RowEdits::allow(const SampleRow& row) {
    masked_.resize(static_cast<size_t>(size_));
    z_ = masked_.data();
    if (!row.mask && !row.params->only_allowed) {
        std::copy(row_, row_ + size_, z_);
        return;
    }
    std::fill(maxima_.begin(), maxima_.end(), kNever);
    std::vector<bool> filled(static_cast<size_t>(blocks_));
    const auto take = [&](int32_t id) {
        const size_t block = static_cast<size_t>(id / kVocabBlock);
        if (!filled[block]) {
            const int first = id / kVocabBlock * kVocabBlock;
            std::fill(z_ + first, z_ + std::min(first + kVocabBlock, size_), kNever);
            filled[block] = true;
        }
        z_[id] = row_[id];
        maxima_[block] = std::max(maxima_[block], z_[id]);
    };
    const auto masked = [&](int32_t id) { return row.mask && !(row.mask[id / 32] >> (id % 32) & 1); };
    if (row.params->only_allowed) {
        for (const int32_t id : row.params->allowed) {
            if (!masked(id)) take(id);
        }
        return;
    }
    for (int first = 0; first < size_; first += 32) {
        if (first % kVocabBlock == 0 && first + kVocabBlock <= size_ &&
            (row.mask[first / 32] & row.mask[first / 32 + 1]) == ~0u) {
            std::copy(row_ + first, row_ + first + kVocabBlock, z_ + first);
            maxima_[static_cast<size_t>(first / kVocabBlock)] = raw_maxima_[first / kVocabBlock];
            first += 32;
            continue;
        }
        for (uint32_t word = row.mask[first / 32]; word; word &= word - 1) {
            const int id = first + __builtin_ctz(word);
            if (id < size_) take(id);
        }
    }
}

// The row is a copy (see `allow`). A block whose maximum is -inf has no values.
void RowEdits::compare_mass(int from) {
    const int edge = from / kVocabBlock, start = edge * kVocabBlock;
    float text = kNever, mass = kNever;
    for (int block = 0; block < edge; ++block) text = std::max(text, maxima_[static_cast<size_t>(block)]);
    for (int block = edge + 1; block < blocks_; ++block) mass = std::max(mass, maxima_[static_cast<size_t>(block)]);
    const bool mixed = edge < blocks_ && maxima_[static_cast<size_t>(edge)] > kNever;
    for (int id = start; mixed && id < std::min(start + kVocabBlock, size_); ++id) {
        float& best = id < from ? text : mass;
        best = std::max(best, z_[id]);
    }
    if (text == kNever || mass == kNever) return;
    if (mass <= text) {
        double weights[kVocabBlock];
        int64_t total = 0;
        for (int block = edge; block < blocks_; ++block) {
            if (maxima_[static_cast<size_t>(block)] == kNever) continue;
            const int first = std::max(from, block * kVocabBlock), end = std::min((block + 1) * kVocabBlock, size_);
            kernels_.weights(z_ + first, end - first, text, weights);
            for (int i = 0; i < end - first; ++i) total += std::llrint(weights[i] * kPoint);
        }
        if (total <= static_cast<int64_t>(kPoint)) return;
    }
    std::fill(maxima_.begin(), maxima_.begin() + edge, kNever);
    if (!mixed) return;
    std::fill(z_ + start, z_ + from, kNever);
    kernels_.block_maxima(z_ + start, std::min(kVocabBlock, size_ - start), &maxima_[static_cast<size_t>(edge)]);
}

float best_permitted(const SampleRow& row, int size) {
    const std::vector<int32_t> never = banned(row);
    float best = kNever;
    const auto look = [&](int32_t id) {
        if (id < 0 || id >= size || !(row.logits[id] > best)) return;
        if (row.mask && !(row.mask[id / 32] >> (id % 32) & 1)) return;
        if (std::find(never.begin(), never.end(), id) == never.end()) best = row.logits[id];
    };
    if (row.params->only_allowed) {
        std::for_each(row.params->allowed.begin(), row.params->allowed.end(), look);
    } else {
        for (int32_t id = 0; id < size; ++id) look(id);
    }
    return best;
}

void RowEdits::penalise(const SampleRow& row) {
    const SampleParams& params = *row.params;
    const auto& counts = row.history->counts();
    if (row.path.empty()) {
        for (const auto& [id, count] : counts) set(id, penalised(z_[id], params, count));
        return;
    }
    std::unordered_map<int32_t, int32_t> longer = counts;
    for (const int32_t id : row.path) ++longer[id];
    for (const auto& [id, count] : longer) set(id, penalised(z_[id], params, count));
}

void RowEdits::set(int32_t id, float value) {
    const int32_t block = id / kVocabBlock;
    if (z_ == row_) {
        edits_.push_back({id, z_[id]});
    } else if (maxima_[static_cast<size_t>(block)] == kNever) {
        return;  // a block without an allowed id: it is not in the row
    }
    z_[id] = value;
    touched_.push_back(block);
}

// Recomputes the maxima of the edited blocks.
void RowEdits::refresh() {
    std::sort(touched_.begin(), touched_.end());
    touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
    for (const int32_t block : touched_) {
        const int first = block * kVocabBlock;
        kernels_.block_maxima(z_ + first, std::min(kVocabBlock, size_ - first), &maxima_[static_cast<size_t>(block)]);
    }
}

void RowEdits::restore() {
    if (changed_ && z_ == row_) {
        for (size_t i = edits_.size(); i-- > 0;) row_[edits_[i].id] = edits_[i].before;
    }
    changed_ = false;
}

}  // namespace headrace
