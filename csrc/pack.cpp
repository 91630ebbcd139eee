#include "pack.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "program_turns.h"

namespace headrace {
namespace {

struct SourceFormat {
    std::string_view name;
    int32_t block, block_bytes;
};

// In the order of SourceKind.
constexpr SourceFormat kSources[] = {
    {"Q4_0", 32, 18},   {"Q4_1", 32, 20},     {"Q5_0", 32, 22},   {"Q5_1", 32, 24},   {"Q8_0", 32, 34},
    {"Q2_K", 256, 84},  {"Q3_K", 256, 110},   {"Q4_K", 256, 144}, {"Q5_K", 256, 176}, {"Q6_K", 256, 210},
    {"IQ4_NL", 32, 18}, {"IQ4_XS", 256, 136}, {"BF16", 1, 2},     {"F16", 1, 2},      {"F32", 1, 4},
};

const SourceFormat& format_of(SourceKind kind) { return kSources[static_cast<int>(kind)]; }

// Memory to be written at once.
uint8_t* provided(size_t bytes, Arena& arena, ThreadPool& pool) {
    uint8_t* memory = arena.allocate(bytes);
    arena.provide_all(pool);
    return memory;
}

// The bias padded to whole row blocks, in the arena.
const float* keep_bias(const PackRequest& request, Arena& arena, ThreadPool& pool) {
    if (!request.bias) return nullptr;
    const size_t padded = static_cast<size_t>(request.n + 15) / 16 * 16;
    auto* kept = reinterpret_cast<float*>(provided(padded * sizeof(float), arena, pool));
    std::copy(request.bias, request.bias + request.n, kept);
    return kept;
}

void check(const PackRequest& request) {
    if (request.n < 1 || request.k < 1)
        throw std::invalid_argument("a packed tensor has at least one row and one column");
    source_row_bytes(request.source.kind, request.k);
}

void fill(const PackRequest& request, const PackedTensor& tensor, uint8_t* data, const Kernels& kernels,
          ThreadPool& pool) {
    Turns turns;
    turns.begin(1, pool.size());
    pool.run([&](int thread) {
        turns.at(0).share(tensor.row_blocks(), thread, [&](int first, int last) {
            kernels.pack->pack(request.source, tensor, data, first, last);
        });
    });
}

}  // namespace

SourceKind parse_source_kind(std::string_view name) {
    for (size_t i = 0; i < std::size(kSources); ++i) {
        if (kSources[i].name == name) return static_cast<SourceKind>(i);
    }
    throw std::invalid_argument("no native kernels for weights of type " + std::string(name) +
                                "; use backend=\"torch\"");
}

std::string_view packed_kind_name(PackedKind kind) { return format_of(static_cast<SourceKind>(kind)).name; }

int64_t source_row_bytes(SourceKind kind, int64_t k) {
    const SourceFormat& format = format_of(kind);
    if (k % format.block != 0) {
        throw std::invalid_argument(std::string(format.name) + " rows have a multiple of " +
                                    std::to_string(format.block) + " columns, not " + std::to_string(k));
    }
    return k / format.block * format.block_bytes;
}

PackedKind packed_kind(SourceKind kind, std::string_view quantize) {
    if (quantize.empty())
        return static_cast<PackedKind>(std::min(static_cast<int>(kind), static_cast<int>(PackedKind::kBf16)));
    if (quantize != "int8" && quantize != "int4") {
        throw std::invalid_argument("quantize must be int8 or int4, not " + std::string(quantize));
    }
    if (kind < SourceKind::kBf16) {
        throw std::invalid_argument("weights of type " + std::string(format_of(kind).name) +
                                    " are quantised already; leave quantize out");
    }
    return quantize == "int8" ? PackedKind::kQ8_0 : PackedKind::kQ4_0;
}

PackedTensor pack_tensor(const PackRequest& request, const Kernels& kernels, Arena& arena, ThreadPool& pool) {
    check(request);
    PackedTensor tensor{nullptr, row_block_bytes(request.kind, request.k), request.kind, request.n, request.k, nullptr};
    uint8_t* data = provided(static_cast<size_t>(tensor.stride) * tensor.row_blocks(), arena, pool);
    tensor.data = data;
    tensor.bias = keep_bias(request, arena, pool);
    fill(request, tensor, data, kernels, pool);
    return tensor;
}

std::pair<PackedTensor, PackedTensor> pack_pair(const PackRequest& gate, const PackRequest& up, const Kernels& kernels,
                                                Arena& arena, ThreadPool& pool) {
    check(gate);
    check(up);
    if (gate.n != up.n || gate.k != up.k) throw std::invalid_argument("gate and up must have the same size");
    const int64_t gate_bytes = row_block_bytes(gate.kind, gate.k), stride = gate_bytes + row_block_bytes(up.kind, up.k);
    PackedTensor first{nullptr, stride, gate.kind, gate.n, gate.k, keep_bias(gate, arena, pool)};
    PackedTensor second{nullptr, stride, up.kind, up.n, up.k, keep_bias(up, arena, pool)};
    uint8_t* data = provided(static_cast<size_t>(stride) * first.row_blocks(), arena, pool);
    first.data = data;
    second.data = data + gate_bytes;
    fill(gate, first, data, kernels, pool);
    fill(up, second, data + gate_bytes, kernels, pool);
    return {first, second};
}

}  // namespace headrace
