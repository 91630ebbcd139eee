// Whether a packed tensor can be multiplied: a damaged file shows here, not as broken logits later.
#pragma once

#include "linear/tile.h"

namespace headrace {

// Whether every scale, minimum and bfloat16 weight of a row block is a number and finite.
bool row_block_is_finite(const PackedTensor& tensor, int block);

}  // namespace headrace
