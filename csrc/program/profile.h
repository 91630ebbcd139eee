// Where the time of a program's steps goes, phase by phase, beside what each phase reads and multiplies.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "program/needs.h"

namespace headrace {

enum class Products { kNone, kInt8, kBf16, kF32 };
// "", "int8", "bf16", "f32"
const char* products_name(Products products);

// What a phase touches in one step.
struct PhaseCost {
    std::string kernel;  // "Q4_K direct", "Q8_0 panels", "attention bf16", "quantize" ...
    double weights = 0;  // bytes of weights, or of K and V
    double rows = 0;     // bytes of the rows that it reads and writes
    double macs = 0;     // multiplications, each with its sum
    Products products = Products::kNone;
};

// What the accesses of a phase (needs_of), its weights, and the step's K and V say.
PhaseCost cost_of(const Phase& phase, SegmentKind segment, int rows, const ProgramShape& shape, const Kernels& kernels,
                  AttentionStep& attention);

// One kind of kernel under one name, in all steps of so many rows.
struct ProfileEntry {
    int64_t calls = 0;
    double seconds = 0;  // as thread 0 saw them
    double idle = 0;     // in which a thread had nothing to do: mean over the threads
    double weights = 0, rows = 0, macs = 0;
    Products products = Products::kNone;
};

class Profile {
public:
    using Clock = std::chrono::steady_clock;
    using Key = std::tuple<int, std::string, std::string>;  // rows of the step, name, kernel

    // One thread's way through one phase.
    struct Visit {
        const char* name;
        const Phase* phase;  // null: what belongs to no phase
        SegmentKind segment;
        int rows;
        double seconds, busy;
    };

    // A step that begins: at most so many visits.
    void begin(int threads, size_t visits);
    std::vector<Visit>& visits(int thread) { return visits_[static_cast<size_t>(thread)]; }
    // Adds the visits of the threads; those that took part went the same way. `prepared`: seconds before they began.
    void end(int rows, double prepared, const ProgramShape& shape, const Kernels& kernels, AttentionStep& attention);

    void clear() { entries_.clear(); }
    const std::map<Key, ProfileEntry>& entries() const { return entries_; }

private:
    std::vector<std::vector<Visit>> visits_;  // [threads]
    std::map<Key, ProfileEntry> entries_;
};

}  // namespace headrace
