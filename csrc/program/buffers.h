// Buffers of a program: each holds the rows of one value of a step.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/quantize_act_kernels.h"

namespace headrace {

// 64-byte aligned memory. Growing it discards the contents.
class Memory {
public:
    Memory() = default;
    Memory(Memory&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
        other.data_ = nullptr, other.bytes_ = 0;
    }
    Memory& operator=(Memory&&) = delete;
    ~Memory();
    // Throws std::bad_alloc.
    void reserve(size_t bytes);
    uint8_t* data() const { return data_; }

private:
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

// Element format. kA8 (int8 with scales) and kBf16 are inputs of linear layers.
enum class BufferKind { kFloat, kA8, kBf16 };

// The first column of a phase's operand in a buffer.
struct Place {
    int buffer = -1;
    int column = 0;
};

class Buffer {
public:
    static constexpr int kMostColumns = 1 << 28;

    // `width`: columns, 1 to kMostColumns. `local`: an input that each thread may compute for itself while it is small,
    // instead of waiting for the others. `rounding`, `threshold`: see A8. Throws std::invalid_argument for a width out
    // of range or a local float buffer.
    Buffer(BufferKind kind, int width, bool local, int threads, Rounding rounding = Rounding::kGroup,
           float threshold = 0.0f);
    void reserve(int rows);

    BufferKind kind() const { return kind_; }
    Rounding rounding() const { return rounding_; }
    int width() const { return width_; }
    int64_t stride() const { return stride_; }  // floats between the starts of two rows
    float* floats() const { return reinterpret_cast<float*>(memory_.data()); }
    // Whether each thread computes `rows` rows in its own memory.
    bool is_local(int rows) const { return local_ && int64_t{rows} * tiles_of(width_) <= kLocalTiles; }
    bool local() const { return local_; }
    // Makes the buffer shared: all threads compute it together and wait until it is complete.
    void make_together() { local_ = false; }
    A8 a8(int rows, int thread) const;
    Bf16Rows bf16(int rows, int thread) const;

private:
    // Above about this size, computing the input once per thread costs more than a barrier.
    static constexpr int kLocalTiles = 32;

    uint8_t* input(int rows, int thread) const;
    size_t local_bytes() const;  // per thread

    const BufferKind kind_;
    const int width_;
    const int64_t stride_;
    const Rounding rounding_;
    const float threshold_;
    bool local_;
    Memory memory_;
    Memory own_;  // [threads][local_bytes] local inputs
};

}  // namespace headrace
