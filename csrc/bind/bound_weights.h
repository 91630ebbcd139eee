// Packed weights as Python holds them: with the arena they lie in.
#pragma once

#include <memory>
#include <vector>

#include "linear/linear.h"

namespace headrace {

struct BoundTensor {
    PackedTensor packed;
    std::shared_ptr<Arena> arena;
};

struct BoundLinear {
    PackedLinear packed;
    std::vector<BoundTensor> tensors;
};

}  // namespace headrace
