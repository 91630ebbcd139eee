// Sampler: from logits to tokens. It draws the same tokens as headrace.ops.sampling in torch.
//
// Stages: bias, allowed ids, mask, bad words, min_tokens, no-repeat-ngram -> repetition -> frequency and presence ->
// DRY -> mass -> (greedy: argmax) -> temperature -> top-n-sigma -> top-k -> typical -> top-p -> min-p -> XTC ->
// mirostat -> argmax of logit + noise over the kept tokens. Equal values are always in order of their ids.
// Probabilities are summed in fixed point (2^-40), so the order of the sum does not matter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sample/edits.h"
#include "sample/filters.h"
#include "sample/kernels.h"
#include "sample/params.h"

namespace headrace {

struct TokenReport {
    int32_t id = -1;
    float logprob = 0.0f;
    int rank = 0;     // 1: the most likely token; 0: not reported
    double mu = 0.0;  // state of mirostat after this token
    std::vector<int32_t> top_ids;
    std::vector<float> top_logprobs;
};

// Report of a drawn token. k < 0: none; otherwise its log-probability, its rank and the k best tokens. They are
// computed from the logits that the token was drawn from if `processed`, from those after masks, bans and penalties if
// SampleParams::masked_logprobs, otherwise from the model's logits.
struct Report {
    int k = -1;
    bool processed = false;
};

struct NoiseKey {
    uint32_t k0, k1;
};

// A tree of drafted tokens. Row 0 has the logits of the last known token, row i + 1 those of node i. parents[i] < i;
// -1: the last known token.
struct DraftTree {
    Ids tokens, parents;
};

// Distance between consecutive rows: floats of logits, block maxima, words of the mask.
struct RowStrides {
    ptrdiff_t logits = 0, maxima = 0, mask = 0;
};

// Uniform random number in [0, 1) for a key, position and purpose; the same as headrace.ops.noise.coin.
double coin(NoiseKey key, uint32_t position, uint32_t purpose);

// Probabilities of a row's kept tokens, ids ascending.
struct Distribution {
    std::vector<int32_t> ids;
    std::vector<double> shares;

    double of(int32_t token) const;
};

// A chain of drafted tokens and the draft distribution q of each: probabilities by id; missing ids have 0. Without q,
// each token has probability 1. `block`: block verification instead of token by token.
struct DraftChain {
    Ids tokens;
    std::span<const std::vector<float>> q;
    bool block = false;
};

struct Walk {
    std::vector<int32_t> path;         // accepted nodes
    std::vector<TokenReport> reports;  // one per node of the path, then one for the token after it
};

// The sampler of one thread: scratch memory, and the kernels of one instruction set. Functions return an error message
// (one line) or "", because an error in one row must not stop the others.
class Sampler {
public:
    static constexpr uint32_t kTarget = 0, kDraft = 1, kAccept = 2, kResidual = 3,
                              kCoin = 4;  // purposes of the noise (headrace.ops.noise.Purpose)

    Sampler(const SampleKernels& kernels, int vocab_size)
        : kernels_(kernels), size_(vocab_size), edits_(kernels, vocab_size), kept_(kernels) {}

    // Draws one token for each key.
    std::string draw(const SampleRow& row, std::span<const NoiseKey> keys, Report report, std::vector<TokenReport>& out,
                     uint32_t purpose = kTarget);

    // Verification: draws a token at row 0, follows the child with this token, draws at its row, and so on, each with
    // the noise of its position. `first` is row 0, without a path.
    std::string verify(const SampleRow& first, const DraftTree& tree, RowStrides strides, NoiseKey key, Report report,
                       Walk& out);

    // Verification by rejection sampling. `first` is row 0; each drafted token has a row after it. If nothing can be
    // drawn at the last accepted token's row, the walk ends with this token.
    std::string reject(const SampleRow& first, const DraftChain& chain, RowStrides strides, NoiseKey key, Report report,
                       Walk& out);

    // Draws a draft token, and returns the distribution that it was drawn from: q by id, [vocab].
    std::string propose(const SampleRow& row, NoiseKey key, int32_t& token, std::vector<float>& q);

    // The k best tokens and their log-probabilities after biases, bans and penalties, as a report without a token. A
    // mask removes tokens, but does not change the log-probabilities of the others.
    std::string top(const SampleRow& row, int k, TokenReport& out);

    // Undoes the edits of a row after a call threw.
    void restore() { edits_.restore(); }

    // Reports a given token under the model's logits.
    std::string score(const SampleRow& row, int32_t token, int k, TokenReport& out);

private:
    std::string choose(const SampleRow& row);
    std::string choose_with_coin(const SampleRow& row, NoiseKey key);  // and XTC, with the key's coin
    std::string distribution(const SampleRow& row, NoiseKey key, Distribution& out);
    int32_t draw_left(const Distribution& p, const std::vector<double>& left, NoiseKey key, uint32_t position);
    std::string draw_singly(const SampleRow& row, std::span<const NoiseKey> keys, Report report,
                            std::span<TokenReport> out, uint32_t purpose);
    double norm_of(const LogitRow& row) const;  // the logarithm of the sum of exp(logit)
    void report_chosen(const SampleParams& params, Report report, std::span<TokenReport> out);
    void describe(const LogitRow& row, double norm, int k, std::span<TokenReport> out);
    void describe_kept(int k, std::span<TokenReport> out);
    float best_of(const LogitRow& row) const;

    const SampleKernels& kernels_;
    const int size_;
    RowEdits edits_;
    Candidates kept_;
    bool greedy_ = false;
};

}  // namespace headrace
