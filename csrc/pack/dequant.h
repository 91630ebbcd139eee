// Decoding of GGUF blocks to float32. src/headrace/weights/decode.py computes the same bits with numpy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace headrace {

struct Format {
    std::string_view name;
    size_t block;        // elements per block
    size_t block_bytes;  // bytes per block
    void (*decode)(const uint8_t* src, float* dst, size_t blocks);
};

// The format with this name, or nullptr.
const Format* find_format(std::string_view name);

// Decodes `blocks` blocks on up to `threads` threads. src: [blocks * block_bytes], dst: [blocks * block].
void dequantize(const Format& format, const uint8_t* src, float* dst, size_t blocks, int threads);

}  // namespace headrace
