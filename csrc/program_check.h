// Whether a packed tensor can be multiplied: a damaged file shows here, not as broken logits later.
#pragma once

#include "threadpool.h"
#include "tile.h"

namespace headrace {

// Whether every scale, minimum and bfloat16 weight is a number and finite.
bool all_finite(const PackedTensor& tensor, ThreadPool& pool);

}  // namespace headrace
