// Which tokens may be drawn: top-n-sigma, top-k, typical, top-p, min-p, XTC, mirostat on logits after temperature.
#pragma once

#include <cstdint>
#include <vector>

#include "sample/kernels.h"
#include "sample/params.h"

namespace headrace {

// The kept tokens of one row. While all filters so far keep a prefix of the falling order, a cut says it all and the
// vocabulary is not listed; after top-k or typical the tokens are listed, ids ascending.
class Candidates {
public:
    explicit Candidates(const SampleKernels& kernels) : kernels_(kernels) {}

    // Keeps every token of the row, whose largest logit is above -inf and finite.
    void reset(const LogitRow& row, float best);
    // Applies the filters of `params` in their order.
    void filter(const SampleParams& params);
    void top_k(int k);
    void typical(double p);
    void top_p(double p);
    void min_p(double p);
    void top_n_sigma(double n);
    // XTC: of the tokens this likely, only the least likely stays.
    void exclude_top(double threshold);
    // Mirostat: the best token, and those of at most so many bits of surprise.
    void surprise(double most);

    // argmax of logit + noise over what is kept.
    int32_t draw(const Noise& noise);

    const LogitRow& row() const { return row_; }
    bool all() const { return !listed_ && cut_.value == kNever; }
    // Turns a cut into a list: what is kept, ids ascending.
    void list();
    const std::vector<int32_t>& ids() const { return ids_; }
    const std::vector<float>& values() const { return values_; }
    float best() const { return best_; }
    // Sum of exp(logit - best()) over what is kept, in fixed point (2^-40).
    int64_t total();

    // The places of the k first of the list in falling order.
    std::vector<int> order(int k) const;

private:
    static constexpr float kNever = -__builtin_inff();
    struct Edge {  // of an ascending order of keys, of equals the lowest id first: the last that is kept
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
