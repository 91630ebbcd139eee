// Where a program keeps the values of a step: rows of one width, as many as the step has.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/quantize_act_kernels.h"

namespace headrace {

// 64-byte aligned memory that grows, without keeping what was in it.
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

// Floats, or the input of a linear layer: int8 with scales (A8), or bfloat16.
enum class BufferKind { kFloat, kA8, kBf16 };

// A value of a phase: float columns [column, ...) of a buffer's rows.
struct Place {
    int buffer = -1;
    int column = 0;
};

class Buffer {
public:
    static constexpr int kMostColumns = 1 << 28;

    // `local`: an input that every thread may make for itself while it is small, instead of waiting for the others.
    // Throws std::invalid_argument for a width that cannot be.
    // `rounding`: how an A8 input becomes integers; `threshold`: as A8 has it.
    Buffer(BufferKind kind, int width, bool local, int threads, Rounding rounding = Rounding::kGroup,
           float threshold = 0.0f);
    void reserve(int rows);

    BufferKind kind() const { return kind_; }
    Rounding rounding() const { return rounding_; }
    int width() const { return width_; }
    int64_t stride() const { return stride_; }  // floats from row to row
    float* floats() const { return reinterpret_cast<float*>(memory_.data()); }
    // Whether `rows` rows are made by every thread in memory of its own.
    bool is_local(int rows) const { return local_ && int64_t{rows} * tiles_of(width_) <= kLocalTiles; }
    bool local() const { return local_; }
    // From now on all threads make it together, and wait until it is made.
    void make_together() { local_ = false; }
    A8 a8(int rows, int thread) const;
    Bf16Rows bf16(int rows, int thread) const;

private:
    // About where normalising and quantising a row once more costs what a barrier costs.
    static constexpr int kLocalTiles = 32;

    uint8_t* input(int rows, int thread) const;
    size_t local_bytes() const;  // of a thread

    const BufferKind kind_;
    const int width_;
    const int64_t stride_;
    const Rounding rounding_;
    const float threshold_;
    bool local_;
    Memory memory_;
    Memory own_;  // [threads] small inputs
};

}  // namespace headrace
