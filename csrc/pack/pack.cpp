#include "pack/pack.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "pack/scale_check.h"
#include "system/nodes.h"
#include "system/os.h"

namespace headrace {
namespace {

constexpr size_t kPieceBytes = size_t{2} << 20;  // packed bytes per piece of work

struct SourceFormat {
    std::string_view name;
    int32_t block, block_bytes;
};

// In the order of SourceKind.
constexpr SourceFormat kSources[] = {
    {"Q4_0", 32, 18},   {"Q4_1", 32, 20},     {"Q5_0", 32, 22},   {"Q5_1", 32, 24},     {"Q8_0", 32, 34},
    {"Q2_K", 256, 84},  {"Q3_K", 256, 110},   {"Q4_K", 256, 144}, {"Q5_K", 256, 176},   {"Q6_K", 256, 210},
    {"IQ4_NL", 32, 18}, {"IQ4_XS", 256, 136}, {"BF16", 1, 2},     {"F16", 1, 2},        {"F32", 1, 4},
    {"MXFP4", 32, 17},  {"NF4", 32, 18},      {"FP4", 32, 18},    {"S4", 32, 14},       {"S8", 32, 22},
    {"G4_32", 32, 19},  {"G4_128", 128, 67},  {"G8_32", 32, 35},  {"G8_128", 128, 131}, {"C8", 32, 34},
};

const SourceFormat& format_of(SourceKind kind) { return kSources[static_cast<int>(kind)]; }

// Padded to whole row blocks.
size_t bias_bytes(const PackedTensor& tensor) { return static_cast<size_t>(tensor.row_blocks()) * 16 * sizeof(float); }

void check(const PackRequest& request) {
    if (request.n < 1 || request.k < 1)
        throw std::invalid_argument("a packed tensor has at least one row and one column");
    source_row_bytes(request.source.kind, request.k);
    if (request.kind == PackedKind::kC8 && request.k > kMostRowColumns) {
        throw std::invalid_argument("C8 rows have at most " + std::to_string(kMostRowColumns) + " columns, not " +
                                    std::to_string(request.k) + "; their sums would overflow: store them as Q8_0");
    }
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
    if (quantize.empty()) return is_float(kind) ? PackedKind::kBf16 : static_cast<PackedKind>(kind);
    if (quantize != "int8" && quantize != "int4") {
        throw std::invalid_argument("quantize must be int8 or int4, not " + std::string(quantize));
    }
    if (!is_float(kind)) {
        throw std::invalid_argument("weights of type " + std::string(format_of(kind).name) +
                                    " are quantised already; leave quantize out");
    }
    return quantize == "int8" ? PackedKind::kQ8_0 : PackedKind::kQ4_0;
}

namespace {

// Allocates row blocks, the first part of them on the first memory node, the next on the next.
uint8_t* place_rows(Arena& arena, int64_t stride, int64_t blocks) {
    uint8_t* data = arena.allocate(static_cast<size_t>(stride * blocks));
    const std::vector<os::Node>& nodes = os::nodes();
    const std::vector<uintptr_t> borders = node_borders(data, stride, blocks, static_cast<int>(nodes.size()));
    for (size_t node = 0; node + 1 < borders.size(); ++node)
        os::place_on(nodes[node], data + (borders[node] - borders[0]), borders[node + 1] - borders[node]);
    return data;
}

}  // namespace

PackedTensor Packer::add(const PackRequest& request, const Kernels& kernels) {
    check(request);
    const int64_t stride = row_block_bytes(request.kind, request.k);
    uint8_t* data = place_rows(arena_, stride, (request.n + 15) / 16);
    return lay_out(request, data, stride, kernels);
}

std::pair<PackedTensor, PackedTensor> Packer::add_pair(const PackRequest& gate, const PackRequest& up,
                                                       const Kernels& kernels) {
    check(gate);
    check(up);
    if (gate.n != up.n || gate.k != up.k) throw std::invalid_argument("gate and up must have the same size");
    const int64_t gate_bytes = row_block_bytes(gate.kind, gate.k), stride = gate_bytes + row_block_bytes(up.kind, up.k);
    uint8_t* data = place_rows(arena_, stride, (gate.n + 15) / 16);
    const PackedTensor first = lay_out(gate, data, stride, kernels);
    return {first, lay_out(up, data + gate_bytes, stride, kernels)};
}

PackedTensor Packer::lay_out(const PackRequest& request, uint8_t* data, int64_t stride, const Kernels& kernels) {
    PackedTensor tensor{data, stride, request.kind, request.n, request.k, nullptr};
    if (request.bias) tensor.bias = reinterpret_cast<const float*>(arena_.allocate(bias_bytes(tensor)));
    jobs_.emplace_back(request, tensor, kernels, added_++);
    return tensor;
}

std::vector<int> Packer::run(ThreadPool& pool, size_t bytes) {
    if (arena_.filled()) return jobs_.clear(), std::vector<int>();
    std::vector<Piece> pieces;
    size_t jobs = 0;
    for (size_t taken = 0; jobs < jobs_.size() && taken < bytes; ++jobs) {
        Job& job = jobs_[jobs];
        const int blocks = job.tensor.row_blocks();
        const int turn = std::max(1, static_cast<int>(kPieceBytes / job.tensor.stride));
        for (int first = 0; first < blocks; first += turn)
            pieces.push_back({&job, first, std::min(first + turn, blocks)});
        taken += static_cast<size_t>(row_block_bytes(job.tensor.kind, job.tensor.k)) * static_cast<size_t>(blocks);
    }
    std::atomic<size_t> next{0};
    pool.run([&](int) noexcept {
        for (size_t piece; (piece = next.fetch_add(1)) < pieces.size();) fill(pieces[piece]);
    });
    std::vector<int> broken;
    for (; jobs > 0; --jobs, jobs_.pop_front()) {
        if (!jobs_.front().finite) broken.push_back(jobs_.front().number);
    }
    return broken;
}

void Packer::fill(const Piece& piece) {
    Job& job = *piece.job;
    const PackRequest& request = job.request;
    const PackedTensor& tensor = job.tensor;
    const int blocks = piece.last - piece.first;
    const int64_t bytes = (blocks - 1) * tensor.stride + row_block_bytes(tensor.kind, tensor.k);
    arena_.provide({tensor.data + piece.first * tensor.stride, static_cast<size_t>(bytes)});
    job.kernels.pack->pack(request.source, tensor, const_cast<uint8_t*>(tensor.data), piece.first, piece.last);
    for (int block = piece.first; block < piece.last; ++block) {
        if (!row_block_is_finite(tensor, block)) job.finite = false;
    }
    if (request.mapped_bytes && !request.source.permutation) {
        // The pages of a large matrix would otherwise stay next to its packed rows. A row that another thread still
        // reads comes back from the page cache.
        const size_t row = static_cast<size_t>(request.source.row_bytes), first = 16 * static_cast<size_t>(piece.first);
        const size_t start = std::min(first * row, request.mapped_bytes);
        const size_t end = std::min(16 * static_cast<size_t>(piece.last) * row, request.mapped_bytes);
        if (end > start) os::forget(request.source.rows + start, end - start);
    }
    if (job.left.fetch_sub(blocks) > blocks) return;
    if (tensor.bias) {
        arena_.provide({reinterpret_cast<const uint8_t*>(tensor.bias), bias_bytes(tensor)});
        std::copy(request.bias, request.bias + tensor.n, const_cast<float*>(tensor.bias));
    }
    if (request.mapped_bytes) os::forget(request.source.rows, request.mapped_bytes);
}

PackedTensor pack_tensor(const PackRequest& request, const Kernels& kernels, Arena& arena, ThreadPool& pool) {
    Packer packer(arena);
    const PackedTensor tensor = packer.add(request, kernels);
    packer.run(pool);
    return tensor;
}

std::pair<PackedTensor, PackedTensor> pack_pair(const PackRequest& gate, const PackRequest& up, const Kernels& kernels,
                                                Arena& arena, ThreadPool& pool) {
    Packer packer(arena);
    const auto pair = packer.add_pair(gate, up, kernels);
    packer.run(pool);
    return pair;
}

}  // namespace headrace
