// What is done to a row of logits before temperature: biases, ids that may not come, penalties.
#pragma once

#include <string>
#include <vector>

#include "sample/kernels.h"
#include "sample/params.h"

namespace headrace {

// A row before and after its edits. Few ids are edited, so that is done in place, the block maxima follow, and
// `restore` puts the row back; only where most ids are masked is the row built anew.
class RowEdits {
public:
    RowEdits(const SampleKernels& kernels, int vocab_size);

    // Looks at a row: the reason why its logits are broken, or "".
    std::string open(const SampleRow& row);
    // Edits it: an error, or "".
    std::string apply(const SampleRow& row);
    void restore();

    LogitRow raw() const { return {row_, raw_maxima_, size_, 1.0f}; }
    LogitRow edited(float temperature) const {
        return {changed_ ? z_ : row_, changed_ ? maxima_.data() : raw_maxima_, size_, temperature};
    }

private:
    struct Edit {
        int32_t id;
        float before;
    };

    void begin();
    void allow(const SampleRow& row);
    void penalise(const SampleRow& row);
    void set(int32_t id, float value);
    void refresh();
    std::string unknown_id(const SampleRow& row) const;

    const SampleKernels& kernels_;
    const int size_, blocks_;
    float* row_ = nullptr;
    const float* raw_maxima_ = nullptr;
    float* z_ = nullptr;  // the row as edited: row_, or masked_
    bool changed_ = false;
    std::vector<float> found_, maxima_, masked_;
    std::vector<Edit> edits_;
    std::vector<int32_t> touched_;  // blocks
};

// The largest of the first `size` logits of a row among the ids that may come: allowed, in the mask, not banned. -inf
// where there is none.
float best_permitted(const SampleRow& row, int size);

}  // namespace headrace
