// Commands of the leader to the other ranks, as messages: run the rows of a step, move or copy K and V.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "attention/kv_pool.h"
#include "program/step.h"

namespace headrace {

class Program;
class Ranks;

enum class Command : int32_t { kRun, kMove, kCopy };

// Write a command for program `number` to a message and return its size. Throw std::invalid_argument if the message is
// too small. `hidden`: width of the hidden rows.
size_t write_rows(const StepRows& rows, int hidden, int number, std::span<uint8_t> message);
size_t write_pairs(Command command, KVPool::Pairs pairs, int pool, int number, std::span<uint8_t> message);

// A received command. Valid as long as the message.
struct ReadCommand {
    explicit ReadCommand(std::span<const uint8_t> message);

    Command kind;
    int program;  // number
    StepRows rows{};
    KVPool::Pairs pairs{};
    int pool = 0;  // of the pairs
};

// Carries out commands until the leader ends. `programs`: by number. Throws RankLost, or the error of a command, after
// which this rank counts as lost.
void follow(Ranks& ranks, std::span<Program* const> programs);

}  // namespace headrace
