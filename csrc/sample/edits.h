// Edits of a row of logits before the temperature: biases, banned ids, penalties.
#pragma once

#include <string>
#include <vector>

#include "sample/kernels.h"
#include "sample/params.h"

namespace headrace {

// A row before and after its edits. Most edits change few ids, so they are made in place, the block maxima are updated,
// and `restore` undoes them. Only a mask copies the allowed logits to a separate row.
class RowEdits {
public:
    RowEdits(const SampleKernels& kernels, int vocab_size);

    // Selects a row. Returns an error if its logits are NaN or too large, otherwise "".
    std::string open(const SampleRow& row);
    // Applies the edits. Returns an error or "".
    std::string apply(const SampleRow& row);
    // Undoes the edits of the caller's row.
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
    // Bans the ids below `from` if the ids from `from` on are together likelier than the likeliest id below it.
    void compare_mass(int from);
    void penalise(const SampleRow& row);
    void set(int32_t id, float value);
    void refresh();
    std::string unknown_id(const SampleRow& row) const;

    const SampleKernels& kernels_;
    const int size_, blocks_;
    float* row_ = nullptr;
    const float* raw_maxima_ = nullptr;
    float* z_ = nullptr;  // the edited row: row_ or masked_
    bool changed_ = false;
    std::vector<float> found_, maxima_, masked_;
    std::vector<Edit> edits_;
    std::vector<int32_t> touched_;  // numbers of the edited blocks
};

// Largest of the first `size` logits of a row, among the ids that may be drawn (allowed, in the mask, not banned). -inf
// if there is no such id.
float best_permitted(const SampleRow& row, int size);

}  // namespace headrace
