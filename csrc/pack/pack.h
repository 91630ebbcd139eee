// Packing tensors: checks, memory, threads. tile.h says what a packed tensor is.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <string_view>
#include <utility>
#include <vector>

#include "pack/kernels.h"
#include "system/arena.h"
#include "system/kernels.h"
#include "system/threadpool.h"

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
    size_t mapped_bytes = 0;      // of the source, if it lies in a mapped file: its pages are let go once it is packed
};

// Packs tensors together: one is laid out when it is added and filled, with others, by `run`.
class Packer {
public:
    explicit Packer(Arena& arena) : arena_(arena) {}
    Packer(const Packer&) = delete;
    Packer& operator=(const Packer&) = delete;

    // What the request refers to must stay until it has been packed. Tensors are numbered from 0.
    PackedTensor add(const PackRequest& request, const Kernels& kernels);
    // Two tensors of one size, row block by row block in turns: what a gated layer reads is one stream.
    std::pair<PackedTensor, PackedTensor> add_pair(const PackRequest& gate, const PackRequest& up,
                                                   const Kernels& kernels);

    // Fills the next tensors, of `bytes` in all and one more, on all threads of the pool. Returns the numbers of those
    // with values that are NaN or infinite.
    std::vector<int> run(ThreadPool& pool, size_t bytes = SIZE_MAX);
    int waiting() const { return static_cast<int>(jobs_.size()); }  // tensors to be filled

private:
    struct Job {
        Job(const PackRequest& asked, const PackedTensor& made, const Kernels& table, int n)
            : request(asked), tensor(made), kernels(table), number(n), left(made.row_blocks()) {}

        const PackRequest request;
        const PackedTensor tensor;
        const Kernels& kernels;
        const int number;
        std::atomic<int> left;  // row blocks
        std::atomic<bool> finite{true};
    };
    struct Piece {
        Job* job;
        int first, last;  // row blocks
    };

    PackedTensor lay_out(const PackRequest& request, uint8_t* data, int64_t stride, const Kernels& kernels);
    void fill(const Piece& piece);

    Arena& arena_;
    std::deque<Job> jobs_;
    int added_ = 0;
};

// One tensor, or a pair, at once.
PackedTensor pack_tensor(const PackRequest& request, const Kernels& kernels, Arena& arena, ThreadPool& pool);
std::pair<PackedTensor, PackedTensor> pack_pair(const PackRequest& gate, const PackRequest& up, const Kernels& kernels,
                                                Arena& arena, ThreadPool& pool);

}  // namespace headrace
