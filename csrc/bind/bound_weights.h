// Packed weights for Python, together with the arena that owns their memory.
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
