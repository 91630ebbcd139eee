// Packing of tensors: checks, memory, threads. linear/tile.h describes the packed format.
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

// Names: "Q4_0", "Q4_K", "IQ4_XS", "BF16", "F16", "F32" ... Throws std::invalid_argument for a kind that cannot be
// packed.
SourceKind parse_source_kind(std::string_view name);
std::string_view packed_kind_name(PackedKind kind);

// Bytes of a source row of k columns. Throws std::invalid_argument unless k is a multiple of the block size.
int64_t source_row_bytes(SourceKind kind, int64_t k);

// Packed format of a source: the same format; floats become bfloat16, or with `quantize` "int8" kQ8_0 and with "int4"
// kQ4_0. Throws std::invalid_argument for another `quantize`, or a source that is already quantized.
PackedKind packed_kind(SourceKind kind, std::string_view quantize = "");

// Most columns of a kC8 row: an int32 holds the sum of 65,536 products of a byte (0 to 255) and an int8 (up to 127).
constexpr int kMostRowColumns = 65536;

struct PackRequest {
    PackSource source;
    PackedKind kind;
    int32_t n, k;
    const float* bias = nullptr;  // [n] or null; copied
    size_t mapped_bytes = 0;      // size of a source in a mapped file: its pages are released after packing; 0: keep
};

// Packs several tensors on all threads: `add` allocates memory for a tensor, `run` fills the tensors.
class Packer {
public:
    explicit Packer(Arena& arena) : arena_(arena) {}
    Packer(const Packer&) = delete;
    Packer& operator=(const Packer&) = delete;

    // The memory that the request points to must stay valid until `run` has packed it. Tensors are numbered from 0.
    PackedTensor add(const PackRequest& request, const Kernels& kernels);
    // Two tensors of the same size with interleaved row blocks, so that a gated layer reads one stream.
    std::pair<PackedTensor, PackedTensor> add_pair(const PackRequest& gate, const PackRequest& up,
                                                   const Kernels& kernels);

    // Fills the next tensors on all threads of the pool, until they have at least `bytes` bytes together. Returns the
    // numbers of tensors with NaN or infinite scales or values. Those of a filled arena have their contents.
    std::vector<int> run(ThreadPool& pool, size_t bytes = SIZE_MAX);
    int waiting() const { return static_cast<int>(jobs_.size()); }  // tensors that are not filled yet

private:
    struct Job {
        Job(const PackRequest& source, const PackedTensor& packed, const Kernels& table, int n)
            : request(source), tensor(packed), kernels(table), number(n), left(packed.row_blocks()) {}

        const PackRequest request;
        const PackedTensor tensor;
        const Kernels& kernels;
        const int number;
        std::atomic<int> left;  // row blocks that are not packed yet
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

// Packs one tensor, or a pair with interleaved row blocks.
PackedTensor pack_tensor(const PackRequest& request, const Kernels& kernels, Arena& arena, ThreadPool& pool);
std::pair<PackedTensor, PackedTensor> pack_pair(const PackRequest& gate, const PackRequest& up, const Kernels& kernels,
                                                Arena& arena, ThreadPool& pool);

}  // namespace headrace
