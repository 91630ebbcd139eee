// Buffers of a program: each holds the rows of one value of a step.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/quantize_act_kernels.h"

namespace headrace {

// 64-byte aligned memory, its own or borrowed. Growing it discards the contents; borrowed memory does not grow.
class Memory {
public:
    Memory() = default;
    Memory(uint8_t* borrowed, size_t bytes) : data_(borrowed), bytes_(bytes), owned_(false) {}
    Memory(Memory&& other) noexcept : data_(other.data_), bytes_(other.bytes_), owned_(other.owned_) {
        other.data_ = nullptr, other.bytes_ = 0;
    }
    Memory& operator=(Memory&&) = delete;
    ~Memory();
    // Throws std::bad_alloc, also for more than was borrowed.
    void reserve(size_t bytes);
    uint8_t* data() const { return data_; }

private:
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
    bool owned_ = true;
};

// Element format. kA8 (int8 with scales) and kBf16 are inputs of linear layers. kPartial: floats in the rank's slot of
// the next exchange, which sums them over the ranks; the buffer has no memory.
enum class BufferKind { kFloat, kA8, kBf16, kPartial };

// The first column of a phase's operand in a buffer.
struct Place {
    int buffer = -1;
    int column = 0;
};

class Buffer {
public:
    static constexpr int kMostColumns = 1 << 28;
    // Tiles of a local input, at most: above about this size, computing it once per thread costs more than a barrier.
    static constexpr int kLocalTiles = 32;

    // `width`: columns, 1 to kMostColumns. `local`: an input that each thread may compute for itself while it is small,
    // instead of waiting for the others. `rounding`, `threshold`: see A8. Throws std::invalid_argument for a width out
    // of range or a local float buffer.
    Buffer(BufferKind kind, int width, bool local, int threads, Rounding rounding = Rounding::kGroup,
           float threshold = 0.0f);
    // A float buffer in memory that all ranks write.
    Buffer(int width, uint8_t* common, size_t bytes);
    void reserve(int rows);
    // Bytes of a row as `reserve` counts them.
    size_t row_bytes() const;

    BufferKind kind() const { return kind_; }
    Rounding rounding() const { return rounding_; }
    int width() const { return width_; }
    int64_t stride() const { return stride_; }  // floats between the starts of two rows
    static int64_t stride_of(int width);
    float* floats() const { return reinterpret_cast<float*>(memory_.data()); }
    // Whether each thread computes `rows` rows in its own memory.
    bool is_local(int rows) const { return local_ && int64_t{rows} * tiles_of(width_) <= kLocalTiles; }
    bool local() const { return local_; }
    bool common() const { return common_; }
    // Whether it is an input of linear layers.
    bool input() const { return kind_ == BufferKind::kA8 || kind_ == BufferKind::kBf16; }
    // Makes the buffer shared: all threads compute it together and wait until it is complete.
    void make_together() { local_ = false; }
    uint8_t* rows() const { return memory_.data(); }  // of a shared input
    A8 a8(int rows, int thread) const;
    Bf16Rows bf16(int rows, int thread) const;

private:
    uint8_t* input_at(int rows, int thread) const;
    size_t local_bytes() const;  // per thread

    const BufferKind kind_;
    const int width_;
    const int64_t stride_;
    const Rounding rounding_;
    const float threshold_;
    bool local_;
    const bool common_ = false;
    Memory memory_;
    Memory own_;  // [threads][local_bytes] local inputs
};

}  // namespace headrace
