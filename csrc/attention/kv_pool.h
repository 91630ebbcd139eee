// The paged KV pool of a model: blocks of tokens, each a number of pages (kv_page.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/kernels.h"
#include "attention/kv_page.h"
#include "system/arena.h"
#include "system/in_use.h"

namespace headrace {

// "bf16", "int8", "int4" or "f32"; throws std::invalid_argument, one line, for another name.
KVType parse_kv_type(std::string_view name);

class KVPool {
public:
    // The pool is zeroed. The system provides memory when a block is first provided or written. Throws
    // std::invalid_argument unless block_size is a multiple of 16, dim is at most 512 for kInt8 and kInt4 (integer
    // sums) and 65536 for other types, and 32 bits count all positions.
    KVPool(KVType type, int layers, int num_blocks, int block_size, int heads, int dim);

    const KVShape& shape() const { return shape_; }
    int layers() const { return static_cast<int>(layers_.size()); }
    int num_blocks() const { return num_blocks_; }
    int block_size() const { return block_size_; }
    int pages_per_block() const { return block_size_ / kPageTokens; }
    size_t bytes() const { return layer_bytes_ * layers_.size(); }
    // Bytes of one block in all layers.
    static size_t block_bytes(KVType type, int layers, int block_size, int heads, int dim);

    // Makes the system provide the memory of the first `blocks` blocks, on all threads of the pool. Throws ForkedError.
    void provide(ThreadPool& pool, int blocks);

    mutable InUse in_use;  // locked by a step or a copy

    uint8_t* layer(int layer) const { return layers_[static_cast<size_t>(layer)]; }

    using Pairs = std::span<const std::pair<int32_t, int32_t>>;
    // Copies (from, to) in all layers: whole blocks, or single flat positions (block * block_size + offset). All
    // sources are read before the first destination is written. Throws std::out_of_range, or std::runtime_error while a
    // step uses the pool.
    void copy_blocks(Pairs pairs);
    void move(Pairs pairs);

    // Bytes of one block in all layers, as read_blocks and write_blocks lay them out: layer after layer.
    size_t block_bytes() const { return bytes() / static_cast<size_t>(num_blocks_); }
    // Copies whole blocks of all layers out of the pool, in the order of `blocks`. A step may run meanwhile: the caller
    // vouches that none of it writes these blocks. Throws std::out_of_range, std::invalid_argument for a wrong size.
    void read_blocks(std::span<const int32_t> blocks, std::span<uint8_t> out) const;
    // Copies blocks back into the pool. Throws as read_blocks does, or std::runtime_error while a step uses the pool.
    void write_blocks(std::span<const int32_t> blocks, std::span<const uint8_t> bytes);

    // Writes or reads one token's K and V [heads][dim] of a layer, at a flat position.
    void write(const AttentionKernels& kernels, int layer, int position, const float* k, const float* v);
    void read(const AttentionKernels& kernels, int layer, int position, float* k, float* v) const;

private:
    uint8_t* page(int layer, int position, int head) const;
    void check(Pairs pairs, int limit, const char* what) const;
    void check_blocks(std::span<const int32_t> blocks, size_t bytes) const;

    const KVShape shape_;
    const int num_blocks_, block_size_;
    const size_t layer_bytes_;
    Arena arena_;
    std::vector<uint8_t*> layers_;
    int provided_ = 0;  // number of blocks
};

}  // namespace headrace
