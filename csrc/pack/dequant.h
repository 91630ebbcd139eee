// GGUF blocks to float32. The numpy twin in src/headrace/weights/dequant.py gives the very same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace headrace {

struct Format {
    std::string_view name;
    size_t block;        // elements of a block
    size_t block_bytes;  // bytes of a block
    void (*decode)(const uint8_t* src, float* dst, size_t blocks);
};

// The format of that name, or nullptr.
const Format* find_format(std::string_view name);

// Decodes `blocks` blocks on up to `threads` threads; src and dst need no alignment beyond their own type's.
void dequantize(const Format& format, const uint8_t* src, float* dst, size_t blocks, int threads);

}  // namespace headrace
