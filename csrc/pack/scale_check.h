// Check of packed tensors, so that a damaged file is an error when it is loaded and not a NaN in the logits.
#pragma once

#include "linear/tile.h"

namespace headrace {

// Whether every scale, minimum and bfloat16 weight of a row block is finite.
bool row_block_is_finite(const PackedTensor& tensor, int block);

}  // namespace headrace
