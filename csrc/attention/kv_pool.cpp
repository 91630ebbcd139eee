#include "attention/kv_pool.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "system/kernels.h"
#include "system/nodes.h"

namespace headrace {
namespace {

constexpr int kMostDim = 1 << 16, kMostHeads = 1 << 16;  // larger sizes would not fit 32 bits

KVShape checked(KVType type, int layers, int num_blocks, int block_size, int heads, int dim) {
    if (layers < 0 || num_blocks < 1 || heads < 1 || dim < 1) {
        throw std::invalid_argument("a KV pool has at least one block, head and dimension");
    }
    if (block_size < kPageTokens || block_size % kPageTokens) {
        throw std::invalid_argument("block_size must be a multiple of 16, not " + std::to_string(block_size));
    }
    if (dim > kMostDim || heads > kMostHeads) {
        throw std::invalid_argument("a KV pool takes up to " + std::to_string(kMostHeads) + " heads of up to " +
                                    std::to_string(kMostDim) + " dimensions");
    }
    if (num_blocks > std::numeric_limits<int>::max() / block_size) {
        throw std::invalid_argument("a KV pool has at most 2^31 positions, not " + std::to_string(num_blocks) +
                                    " blocks of " + std::to_string(block_size));
    }
    if ((type == KVType::kInt8 || type == KVType::kInt4) && dim > 512) {
        throw std::invalid_argument(std::string(type == KVType::kInt8 ? "int8" : "int4") +
                                    " KV takes heads of up to 512 dimensions, not " + std::to_string(dim));
    }
    const KVShape shape = kv_shape(type, heads, dim);
    const int64_t most = std::numeric_limits<int64_t>::max() / shape.page_bytes / std::max(layers, 1) / heads;
    const int64_t pages = int64_t{num_blocks} * (block_size / kPageTokens);
    if (pages > most || pages > std::numeric_limits<int32_t>::max() / heads) {
        throw std::invalid_argument("a KV pool of " + std::to_string(num_blocks) + " blocks of " +
                                    std::to_string(block_size) + " tokens with " + std::to_string(heads) +
                                    " heads is larger than memory can be; use fewer blocks");
    }
    return shape;
}

}  // namespace

KVType parse_kv_type(std::string_view name) {
    if (name == "bf16") return KVType::kBf16;
    if (name == "int8") return KVType::kInt8;
    if (name == "int4") return KVType::kInt4;
    if (name == "f32") return KVType::kF32;
    throw std::invalid_argument("unknown KV type '" + std::string(name) + "'; use bf16, int8, int4 or f32");
}

KVPool::KVPool(KVType type, int layers, int num_blocks, int block_size, int heads, int dim)
    : shape_(checked(type, layers, num_blocks, block_size, heads, dim)),
      num_blocks_(num_blocks),
      block_size_(block_size),
      layer_bytes_(static_cast<size_t>(shape_.page_offset(int64_t{num_blocks} * (block_size / kPageTokens), 0))),
      arena_(layer_bytes_ * static_cast<size_t>(layers) + 64 * static_cast<size_t>(layers), Arena::Pages::kLarge) {
    for (int i = 0; i < layers; ++i) {
        layers_.push_back(arena_.allocate(layer_bytes_));
        os::interleave(os::nodes(), layers_.back(), layer_bytes_);
    }
}

size_t KVPool::block_bytes(KVType type, int layers, int block_size, int heads, int dim) {
    const KVShape shape = checked(type, layers, 1, block_size, heads, dim);
    return static_cast<size_t>(shape.page_offset(block_size / kPageTokens, 0)) * static_cast<size_t>(layers);
}

void KVPool::provide(ThreadPool& pool, int blocks) {
    if (blocks <= provided_) return;
    const size_t size = layer_bytes_ / static_cast<size_t>(num_blocks_);
    std::vector<std::span<uint8_t>> parts;
    for (uint8_t* base : layers_) {
        parts.emplace_back(base + static_cast<size_t>(provided_) * size,
                           static_cast<size_t>(blocks - provided_) * size);
    }
    arena_.provide(pool, parts);
    provided_ = blocks;
}

void KVPool::check(Pairs pairs, int limit, const char* what) const {
    for (const auto& [from, to] : pairs) {
        if (from < 0 || from >= limit || to < 0 || to >= limit) {
            throw std::out_of_range(std::string(what) + " outside the pool");
        }
    }
}

void KVPool::copy_blocks(Pairs pairs) {
    const Exclusive mine(in_use);
    check(pairs, num_blocks_, "block");
    const size_t size = layer_bytes_ / static_cast<size_t>(num_blocks_);
    std::vector<uint8_t> held(pairs.size() * size);
    for (uint8_t* base : layers_) {
        uint8_t* to = held.data();
        for (const auto& pair : pairs) std::memcpy(to, base + static_cast<size_t>(pair.first) * size, size), to += size;
        const uint8_t* from = held.data();
        for (const auto& pair : pairs)
            std::memcpy(base + static_cast<size_t>(pair.second) * size, from, size), from += size;
    }
}

void KVPool::check_blocks(std::span<const int32_t> blocks, size_t bytes) const {
    for (const int32_t block : blocks) {
        if (block < 0 || block >= num_blocks_) throw std::out_of_range("block outside the pool");
    }
    if (bytes != blocks.size() * block_bytes()) {
        throw std::invalid_argument(std::to_string(blocks.size()) + " blocks have " +
                                    std::to_string(blocks.size() * block_bytes()) + " bytes, not " +
                                    std::to_string(bytes));
    }
}

void KVPool::read_blocks(std::span<const int32_t> blocks, std::span<uint8_t> out) const {
    check_blocks(blocks, out.size());
    const size_t size = layer_bytes_ / static_cast<size_t>(num_blocks_);
    uint8_t* to = out.data();
    for (const int32_t block : blocks) {
        for (const uint8_t* base : layers_) std::memcpy(to, base + static_cast<size_t>(block) * size, size), to += size;
    }
}

void KVPool::write_blocks(std::span<const int32_t> blocks, std::span<const uint8_t> bytes) {
    const Exclusive mine(in_use);
    check_blocks(blocks, bytes.size());
    const size_t size = layer_bytes_ / static_cast<size_t>(num_blocks_);
    const uint8_t* from = bytes.data();
    for (const int32_t block : blocks) {
        for (uint8_t* base : layers_) std::memcpy(base + static_cast<size_t>(block) * size, from, size), from += size;
    }
}

uint8_t* KVPool::page(int layer, int position, int head) const {
    return layers_[static_cast<size_t>(layer)] + shape_.page_offset(position / kPageTokens, head);
}

void KVPool::move(Pairs pairs) {
    const Exclusive mine(in_use);
    const AttentionKernels& kernels = *headrace::kernels().attention;
    check(pairs, num_blocks_ * block_size_, "position");
    const int count = static_cast<int>(pairs.size());
    std::vector<uint8_t> held(static_cast<size_t>((count + kPageTokens - 1) / kPageTokens) *
                              static_cast<size_t>(shape_.page_bytes));
    const auto held_page = [&](int i) { return held.data() + i / kPageTokens * shape_.page_bytes; };
    for (int layer = 0; layer < layers(); ++layer) {
        for (int head = 0; head < shape_.heads; ++head) {
            for (int i = 0; i < count; ++i) {
                const int from = pairs[static_cast<size_t>(i)].first;
                kernels.copy(shape_, page(layer, from, head), from % kPageTokens, held_page(i), i % kPageTokens);
            }
            for (int i = 0; i < count; ++i) {
                const int to = pairs[static_cast<size_t>(i)].second;
                kernels.copy(shape_, held_page(i), i % kPageTokens, page(layer, to, head), to % kPageTokens);
            }
        }
    }
}

void KVPool::write(const AttentionKernels& kernels, int layer, int position, const float* k, const float* v) {
    std::vector<float> scratch(4 * static_cast<size_t>(shape_.padded));
    for (int head = 0; head < shape_.heads; ++head) {
        kernels.write(shape_, page(layer, position, head), position % kPageTokens, k + head * shape_.dim,
                      v + head * shape_.dim, scratch.data());
    }
}

void KVPool::read(const AttentionKernels& kernels, int layer, int position, float* k, float* v) const {
    for (int head = 0; head < shape_.heads; ++head) {
        kernels.read(shape_, page(layer, position, head), position % kPageTokens, k + head * shape_.dim,
                     v + head * shape_.dim);
    }
}

}  // namespace headrace
