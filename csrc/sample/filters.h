// Filters on logits after the temperature: top-n-sigma, top-k, typical, top-p, min-p, XTC, mirostat.
#pragma once

#include <cstdint>
#include <vector>

#include "sample/kernels.h"
#include "sample/params.h"

namespace headrace {

// The tokens of one row that the filters keep. As long as all filters keep a prefix of the descending order, a cut
// (TokenCut) represents them without listing the vocabulary. After top-k, typical or XTC they are a list, ids
// ascending.
class Candidates {
public:
    explicit Candidates(const SampleKernels& kernels) : kernels_(kernels) {}

    // Keeps all tokens of the row. `best`: its largest logit after the temperature; it must be finite.
    void reset(const LogitRow& row, float best);
    // Applies the filters of `params` in their order.
    void filter(const SampleParams& params);
    void top_k(int k);
    void typical(double p);
    void top_p(double p);
    void min_p(double p);
    void top_n_sigma(double n);
    // XTC: removes all tokens with a probability of at least the threshold, except the least likely of them.
    void exclude_top(double threshold);
    // Mirostat: keeps the best token and the tokens with at most `most` bits of surprise (-log2 p).
    void surprise(double most);

    // argmax of logit + noise over the kept tokens.
    int32_t draw(const Noise& noise);

    const LogitRow& row() const { return row_; }
    bool all() const { return !listed_ && cut_.value == kNever; }
    // Turns a cut into a list, ids ascending.
    void list();
    const std::vector<int32_t>& ids() const { return ids_; }
    const std::vector<float>& values() const { return values_; }
    float best() const { return best_; }
    // Sum of exp(logit - best()) over the kept tokens, in fixed point (2^-40).
    int64_t total();

    // Indices in the list of the k largest logits, in descending order.
    std::vector<int> order(int k) const;

private:
    static constexpr float kNever = -__builtin_inff();
    struct Edge {  // the last kept token, in ascending order of (key, id)
        double key;
        int32_t id;
    };

    void keep_within(double limit);
    void collect(float least);
    void weigh();
    void key_by_logit();
    void keep_to(Edge edge);
    float least_of_best(int k) const;
    Edge prefix(int64_t goal, double origin);

    const SampleKernels& kernels_;
    LogitRow row_{};
    float best_ = 0;
    TokenCut cut_{};
    bool listed_ = false;
    std::vector<int32_t> ids_;
    std::vector<float> values_, noise_;
    std::vector<double> keys_, weights_;
    std::vector<int64_t> shares_, bins_;
    std::vector<int> places_;
};

}  // namespace headrace
