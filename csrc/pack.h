// Packing tensors: checks, memory, threads. tile.h says what a packed tensor is.
#pragma once

#include <string_view>
#include <utility>

#include "arena.h"
#include "kernels.h"
#include "threadpool.h"

namespace headrace {

// "Q4_0", "Q4_K", "IQ4_XS", "BF16", "F16", "F32" ... Throws std::invalid_argument for a kind that cannot be packed.
SourceKind parse_source_kind(std::string_view name);
std::string_view packed_kind_name(PackedKind kind);

// Bytes of a source row of k columns; throws std::invalid_argument when k is not whole blocks.
int64_t source_row_bytes(SourceKind kind, int64_t k);

// What a source is packed as: itself; floats as bfloat16, or "int8" (kQ8_0) or "int4" (kQ4_0) where `quantize` says so.
// Only floats can be quantised: throws std::invalid_argument for others.
PackedKind packed_kind(SourceKind kind, std::string_view quantize = "");

struct PackRequest {
    PackSource source;
    PackedKind kind;
    int32_t n, k;
    const float* bias = nullptr;  // [n]; copied
};

// Fills the memory on all threads of the pool.
PackedTensor pack_tensor(const PackRequest& request, const Kernels& kernels, Arena& arena, ThreadPool& pool);

// Two tensors of one size, row block by row block in turns: what a gated layer reads is one stream.
std::pair<PackedTensor, PackedTensor> pack_pair(const PackRequest& gate, const PackRequest& up, const Kernels& kernels,
                                                Arena& arena, ThreadPool& pool);

}  // namespace headrace
