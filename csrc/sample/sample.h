// From logits to tokens, in card B1's order; token for token what headrace.ops.sampling says in torch.
//
// bias, allowed ids, mask, bad words, min_tokens, no-repeat-ngram -> repetition -> frequency and presence -> DRY
// -> (greedy: argmax) -> temperature -> top-n-sigma -> top-k -> typical -> top-p -> min-p -> XTC -> mirostat -> argmax
// of logit + noise over what is kept. Of equals the lowest id comes first, everywhere. Probabilities are added in fixed
// point (2^-40), so no order matters.
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
    int rank = 0;     // from 1; 0: not reported
    double mu = 0.0;  // mirostat's state after this token
    std::vector<int32_t> top_ids;
    std::vector<float> top_logprobs;
};

// What to say of a token: nothing (k < 0), or its log-probability, rank and the k best, under the model's own logits or
// under those it was drawn from.
struct Report {
    int k = -1;
    bool processed = false;
};

struct NoiseKey {
    uint32_t k0, k1;
};

// A tree of drafted tokens: node i's logits are row i + 1, row 0 is the last known token's. parents[i] < i, -1 = row 0.
struct DraftTree {
    Ids tokens, parents;
};

// How far row i + 1 lies behind row i: in floats, block maxima and words of the mask.
struct RowStrides {
    ptrdiff_t logits = 0, maxima = 0, mask = 0;
};

// A number in [0, 1) of a key, position and purpose: headrace.ops.noise.coin.
double coin(NoiseKey key, uint32_t position, uint32_t purpose);

// The probabilities a row's token is drawn with: ids ascending, those that may not come left out.
struct Distribution {
    std::vector<int32_t> ids;
    std::vector<double> shares;

    double of(int32_t token) const;
};

// A chain of drafted tokens, and what each was drawn from: a row of probabilities by id, short of those that are 0.
// Without rows the tokens were chosen, and each q is all on its token. `block`: the chain is judged as a whole.
struct DraftChain {
    Ids tokens;
    std::span<const std::vector<float>> q;
    bool block = false;
};

struct Walk {
    std::vector<int32_t> path;         // the nodes whose tokens were drawn
    std::vector<TokenReport> reports;  // of every drawn token: one per node of the path, then the token after it
};

// The sampler of one thread: scratch memory, and the kernels of one instruction set. Errors come back as a line of
// text, empty where there is none, because one bad row must not stop the others.
class Sampler {
public:
    static constexpr uint32_t kTarget = 0, kDraft = 1, kAccept = 2, kResidual = 3,
                              kCoin = 4;  // purposes of the noise (headrace.ops.noise.Purpose)

    Sampler(const SampleKernels& kernels, int vocab_size)
        : kernels_(kernels), size_(vocab_size), edits_(kernels, vocab_size), kept_(kernels) {}

    // Draws one token for each key into `out`.
    std::string draw(const SampleRow& row, std::span<const NoiseKey> keys, Report report, std::vector<TokenReport>& out,
                     uint32_t purpose = kTarget);

    // Verification: draws at each node reached, with its position's noise, and follows the matching child. `first` is
    // row 0, without a path.
    std::string verify(const SampleRow& first, const DraftTree& tree, RowStrides strides, NoiseKey key, Report report,
                       Walk& out);

    // Verification by rejection: `first` is row 0, and each drafted token has a row after it. Where a token's row
    // cannot be drawn from, the reports end with the path.
    std::string reject(const SampleRow& first, const DraftChain& chain, RowStrides strides, NoiseKey key, Report report,
                       Walk& out);

    // Draws a token to be drafted, and tells what from: q by id.
    std::string propose(const SampleRow& row, NoiseKey key, int32_t& token, std::vector<float>& q);

    // The k best tokens and their log-probabilities after biases, bans and penalties, as a report without a token. A
    // mask leaves fewer to choose from and their log-probabilities as they were.
    std::string top(const SampleRow& row, int k, TokenReport& out);

    // Puts the row back as it was, where a call threw before it did.
    void restore() { edits_.restore(); }

    // A given token under the model's own logits.
    std::string score(const SampleRow& row, int32_t token, int k, TokenReport& out);

private:
    std::string choose(const SampleRow& row);
    std::string choose_with_coin(const SampleRow& row, NoiseKey key);  // and XTC, whose coin is the key's
    std::string distribution(const SampleRow& row, NoiseKey key, Distribution& out);
    int32_t draw_left(const Distribution& p, const std::vector<double>& left, NoiseKey key, uint32_t position);
    std::string draw_singly(const SampleRow& row, std::span<const NoiseKey> keys, Report report,
                            std::span<TokenReport> out, uint32_t purpose);
    double norm_of(const LogitRow& row) const;  // the logarithm of the sum of exp(logit)
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
