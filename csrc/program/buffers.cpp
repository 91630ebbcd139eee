#include "program/buffers.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#include "system/os.h"

namespace headrace {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kTileBytes = std::max(sizeof(A8Block), size_t{64} * sizeof(uint16_t));

}  // namespace

Memory::~Memory() {
    if (owned_) std::free(data_);
}

void Memory::reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    if (!owned_) throw std::bad_alloc();
    std::free(data_);
    data_ = nullptr, bytes_ = 0;
    const size_t unit = bytes >= kHugePage ? kHugePage : kLine;
    bytes = (bytes + unit - 1) / unit * unit;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(unit, bytes));
    if (!data_) throw std::bad_alloc();
    bytes_ = bytes;
    if (unit == kHugePage) os::prefer(os::Pages::kLarge, data_, bytes);
}

Buffer::Buffer(BufferKind kind, int width, bool local, int threads, Rounding rounding, float threshold)
    : kind_(kind), width_(width), stride_(stride_of(width)), rounding_(rounding), threshold_(threshold), local_(local) {
    if (width < 1 || width > kMostColumns)
        throw std::invalid_argument("a buffer is 1 to 2^28 columns wide, not " + std::to_string(width));
    if (local && !input()) throw std::invalid_argument("only inputs of linear layers are made by every thread");
    if (local) own_.reserve(static_cast<size_t>(threads) * local_bytes());
}

Buffer::Buffer(int width, uint8_t* common, size_t bytes)
    : kind_(BufferKind::kFloat),
      width_(width),
      stride_(stride_of(width)),
      rounding_(Rounding::kGroup),
      threshold_(0.0f),
      local_(false),
      common_(true),
      memory_(common, bytes) {}

void Buffer::reserve(int rows) {
    if (kind_ != BufferKind::kPartial) memory_.reserve(static_cast<size_t>(rows) * row_bytes());
}

size_t Buffer::row_bytes() const {
    if (kind_ == BufferKind::kA8) return a8_bytes(1, width_, rounding_);
    if (kind_ == BufferKind::kBf16) return static_cast<size_t>(tiles_of(width_)) * 64 * sizeof(uint16_t);
    return static_cast<size_t>(stride_) * sizeof(float);
}

// Floats per row: whole cache lines, but no multiple of 2 KB, with which one column of all rows would map to a few
// cache sets.
int64_t Buffer::stride_of(int width) {
    const int64_t stride = (int64_t{width} + 15) / 16 * 16;
    return stride % 512 == 0 ? stride + 16 : stride;
}

// A local input has at most kLocalTiles tiles, so at most as many rows.
size_t Buffer::local_bytes() const {
    const size_t row = kTileBytes + (rounding_ == Rounding::kSplit ? sizeof(Outliers) : 0);
    return (kLocalTiles * row + kLine - 1) / kLine * kLine;
}

uint8_t* Buffer::input_at(int rows, int thread) const {
    return is_local(rows) ? own_.data() + static_cast<size_t>(thread) * local_bytes() : memory_.data();
}

A8 Buffer::a8(int rows, int thread) const {
    if (kind_ != BufferKind::kA8) return {};
    return a8_at(input_at(rows, thread), rows, width_, rounding_, threshold_);
}

Bf16Rows Buffer::bf16(int rows, int thread) const {
    if (kind_ != BufferKind::kBf16) return {};
    return {reinterpret_cast<uint16_t*>(input_at(rows, thread)), tiles_of(width_) * 64};
}

}  // namespace headrace
