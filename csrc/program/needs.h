// The buffer accesses of a phase. `Program::seal` checks a program with them before it runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "program/phases.h"

namespace headrace {

// Part of a buffer that a phase reads or writes.
struct Access {
    // kFloats: float columns. kA8, kBf16, kInput: a whole input of a linear layer in A8, bfloat16 or either format.
    // kResult: output of attention or of a gated layer, float columns or an input shared by all threads. kPartial:
    // float columns of a partial result.
    enum class Holds { kFloats, kA8, kBf16, kInput, kResult, kPartial };

    Place place;
    int64_t width;
    Holds holds = Holds::kFloats;
    bool writes = false;
    bool in_place = false;  // the phase may write exactly the columns that it reads
    int piece = 32;         // kResult: columns written at once; A8 needs a multiple of 32
};

enum class SegmentKind { kEmbed, kLayer, kHead };

// The parts of a program that a phase's settings are checked against.
struct ProgramShape {
    int hidden, vocab_size, taps;
    const KVGroups& kv;
    const std::vector<Rope>& ropes;
    const std::vector<Buffer>& buffers;
    const Ranks* ranks;  // or null

    // Throws std::invalid_argument if there is no such buffer.
    const Buffer& buffer(int number) const;
    // Throws std::invalid_argument if there is no such KV pool, or the pool has no such layer.
    const KVShape& kv_of(int pool, int layer) const;
};

// The accesses of a phase. Throws std::invalid_argument if its settings are invalid or do not fit the program.
std::vector<Access> needs_of(const Phase& phase, SegmentKind segment, const ProgramShape& shape);

// Throws std::invalid_argument with the message unless `ok`.
void require(bool ok, const std::string& message);

// "float columns [0, 64) of buffer 3"
std::string in_words(const Access& access);

}  // namespace headrace
