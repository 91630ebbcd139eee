#include "pack/scale_check.h"

#include <cstring>

namespace headrace {
namespace {

// Number of f16 values at the beginning of a header.
int halves(const Layout& layout) {
    switch (layout.scales) {
        case Scales::kZero32:
        case Scales::kSuper32:
        case Scales::kSuper16Min:
            return 32;
        case Scales::kMin32:
            return 64;
        case Scales::kSuper16:
        case Scales::kSuperI8:
            return 16;
        case Scales::kPoint:
        case Scales::kWidePoint:
            return 16 * layout.spans();
        case Scales::kRow:  // before the blocks
        case Scales::kNone:
            return 0;
    }
    return 0;
}

// Whether one of n 16-bit floats is NaN or infinite: all bits of its exponent are set.
bool broken(const uint8_t* data, int n, uint16_t exponent) {
    bool found = false;
    for (int i = 0; i < n; ++i) {
        uint16_t value;
        std::memcpy(&value, data + 2 * i, 2);
        found |= (value & exponent) == exponent;
    }
    return found;
}

}  // namespace

bool row_block_is_finite(const PackedTensor& tensor, int block) {
    const Layout layout = layout_of(tensor.kind);
    const uint8_t* data = tensor.data + block * tensor.stride;
    const int64_t bytes = row_block_bytes(tensor.kind, tensor.k);
    if (layout.by_row() && broken(data, 16, 0x7c00)) return false;
    for (int64_t at = layout.prefix_bytes(); at < bytes; at += layout.block_bytes()) {
        const bool plain = layout.scales == Scales::kNone;
        if (plain ? broken(data + at, layout.block_bytes() / 2, 0x7f80) : broken(data + at, halves(layout), 0x7c00))
            return false;
    }
    return true;
}

}  // namespace headrace
