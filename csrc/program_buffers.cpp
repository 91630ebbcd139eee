#include "program_buffers.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#include "os.h"

namespace headrace {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kTileBytes = std::max(sizeof(A8Block), size_t{64} * sizeof(uint16_t));

size_t row_bytes(BufferKind kind, int width, int64_t stride) {
    if (kind == BufferKind::kFloat) return static_cast<size_t>(stride) * sizeof(float);
    return static_cast<size_t>(tiles_of(width)) * (kind == BufferKind::kA8 ? sizeof(A8Block) : 64 * sizeof(uint16_t));
}

// Whole lines of floats, not a multiple of 2 KB: the same column of all rows would share a few sets of the cache.
int64_t stride_of(int width) {
    const int64_t stride = (int64_t{width} + 15) / 16 * 16;
    return stride % 512 == 0 ? stride + 16 : stride;
}

}  // namespace

Memory::~Memory() { std::free(data_); }

void Memory::reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    std::free(data_);
    data_ = nullptr, bytes_ = 0;
    const size_t unit = bytes >= kHugePage ? kHugePage : kLine;
    bytes = (bytes + unit - 1) / unit * unit;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(unit, bytes));
    if (!data_) throw std::bad_alloc();
    bytes_ = bytes;
    if (unit == kHugePage) os::prefer(os::Pages::kLarge, data_, bytes);
}

Buffer::Buffer(BufferKind kind, int width, bool local, int threads)
    : kind_(kind), width_(width), stride_(stride_of(width)), local_(local) {
    if (width < 1 || width > kMostColumns)
        throw std::invalid_argument("a buffer is 1 to 2^28 columns wide, not " + std::to_string(width));
    if (local && kind == BufferKind::kFloat)
        throw std::invalid_argument("only inputs of linear layers are made by every thread");
    if (local) own_.reserve(static_cast<size_t>(threads) * kLocalTiles * kTileBytes);
}

void Buffer::reserve(int rows) { memory_.reserve(static_cast<size_t>(rows) * row_bytes(kind_, width_, stride_)); }

uint8_t* Buffer::input(int rows, int thread) const {
    return is_local(rows) ? own_.data() + static_cast<size_t>(thread) * kLocalTiles * kTileBytes : memory_.data();
}

A8 Buffer::a8(int rows, int thread) const {
    if (kind_ != BufferKind::kA8) return {};
    return {reinterpret_cast<A8Block*>(input(rows, thread)), tiles_of(width_)};
}

Bf16Rows Buffer::bf16(int rows, int thread) const {
    if (kind_ != BufferKind::kBf16) return {};
    return {reinterpret_cast<uint16_t*>(input(rows, thread)), tiles_of(width_) * 64};
}

}  // namespace headrace
