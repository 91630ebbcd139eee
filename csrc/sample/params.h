// Inputs of the sampler: parameters of a request, tokens of its sequence, and a row of logits.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace headrace {

using Ids = std::span<const int32_t>;

// The part of headrace.data.params.SamplingParams that the sampler needs. The defaults change nothing.
struct SampleParams {
    float temperature = 1.0f;  // below 0.01: greedy
    int top_k = 0;             // 0: off
    double typical_p = 1.0, top_p = 1.0, min_p = 0.0;
    float repetition = 1.0f, frequency = 0.0f, presence = 0.0f;
    int no_repeat_ngram = 0, min_tokens = 0;
    double dry_multiplier = 0.0, dry_base = 1.75;
    int dry_allowed_length = 2, dry_range = 0;
    std::vector<int32_t> dry_breakers;
    double top_n_sigma = 0.0;
    double xtc_probability = 0.0, xtc_threshold = 0.1;
    double mirostat_tau = 0.0, mirostat_eta = 0.1;
    std::vector<std::pair<int32_t, float>> bias;
    std::vector<std::vector<int32_t>> bad_words;
    std::vector<int32_t> stop_ids;  // banned until the output has min_tokens tokens
    std::vector<int32_t> allowed;
    bool only_allowed = false;
    bool constrained = false;      // by a grammar: a draw without its mask is an error
    int mass_from = -1;            // RowEdits::compare_mass; below 0: off
    bool masked_logprobs = false;  // see Report

    bool greedy() const { return temperature < 0.01f; }
    bool penalties() const { return repetition != 1.0f || frequency != 0.0f || presence != 0.0f; }
};

// The tokens of one sequence, and the count of each in its output.
class History {
public:
    explicit History(Ids prompt = {});
    void extend(Ids output);

    const std::vector<int32_t>& tokens() const { return tokens_; }
    int prompt_length() const { return prompt_length_; }
    // Every id of the prompt and the output -> its count in the output.
    const std::unordered_map<int32_t, int32_t>& counts() const { return counts_; }

private:
    std::vector<int32_t> tokens_;
    std::unordered_map<int32_t, int32_t> counts_;
    int prompt_length_;
};

// One row of logits and its sequence. A call may change the logits, but restores them before it returns.
struct SampleRow {
    float* logits;
    const float* maxima;  // block maxima (NaN if a logit of the block is NaN), or null
    const SampleParams* params;
    const History* history;
    Ids path = {};                   // draft tokens between the history and this row
    const uint32_t* mask = nullptr;  // one bit per token, 1 = allowed; or null
    std::optional<double> mu = {};   // mirostat: most surprise in bits; empty for the first token of an output

    int position() const { return static_cast<int>(history->tokens().size() + path.size()); }
};

}  // namespace headrace
