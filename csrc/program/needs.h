// What a phase reads and writes: what a program is checked by before it is run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/kv_pool.h"
#include "program/phases.h"

namespace headrace {

// A part of a buffer that a phase reads or writes.
struct Access {
    // Float columns, an input of a linear layer (whole: a8, bf16, either), or where attention and gated layers leave
    // their result: float columns or an input that all threads have in common.
    enum class Holds { kFloats, kA8, kBf16, kInput, kResult };

    Place place;
    int64_t width;
    Holds holds = Holds::kFloats;
    bool writes = false;
    bool in_place = false;  // the very columns that the phase reads may be written
    int piece = 32;         // of a result: columns that are written at once, whole groups of 32 where that is a8
};

enum class SegmentKind { kEmbed, kLayer, kHead };

// What phases are looked at against.
struct ProgramShape {
    int hidden, vocab_size, taps;
    const KVPool& kv;
    const std::vector<Rope>& ropes;
    const std::vector<Buffer>& buffers;

    // Throws std::invalid_argument for a number that no buffer has.
    const Buffer& buffer(int number) const;
};

// Throws std::invalid_argument where a phase's settings cannot be, by themselves or in such a program.
std::vector<Access> needs_of(const Phase& phase, SegmentKind segment, const ProgramShape& shape);

// Throws std::invalid_argument with the message.
void require(bool ok, const std::string& message);

// "float columns [0, 64) of buffer 3"
std::string in_words(const Access& access);

}  // namespace headrace
