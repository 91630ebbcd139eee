// Profile of a program: for each phase, the time, the bytes that it reads and writes, and its multiplications.
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

// Memory traffic and multiplications of a phase in one step.
struct PhaseCost {
    std::string kernel;  // "Q4_K direct", "Q8_0 panels", "attention bf16", "quantize" ...
    double weights = 0;  // bytes of weights, or of K and V
    double rows = 0;     // bytes of activations read and written
    double macs = 0;     // multiply-accumulates
    Products products = Products::kNone;
};

// Computed from the accesses of the phase (needs_of), its weights, and the K and V that the step reads.
PhaseCost cost_of(const Phase& phase, SegmentKind segment, int rows, const ProgramShape& shape, const Kernels& kernels);

// Totals of one kernel under one phase name, over all steps with the same number of rows.
struct ProfileEntry {
    int64_t calls = 0;
    double seconds = 0;  // measured by thread 0
    double idle = 0;     // seconds without work, mean over the threads
    double weights = 0, rows = 0, macs = 0;
    Products products = Products::kNone;
};

class Profile {
public:
    using Clock = std::chrono::steady_clock;
    using Key = std::tuple<int, std::string, std::string>;  // rows of the step, name, kernel

    // One thread's time in one phase.
    struct Visit {
        const char* name;
        const Phase* phase;  // null: work outside the phases, listed under `name`
        SegmentKind segment;
        int rows;
        double seconds, busy;
    };

    // Starts a step. `visits`: maximum number of visits per thread.
    void begin(int threads, size_t visits);
    std::vector<Visit>& visits(int thread) { return visits_[static_cast<size_t>(thread)]; }
    // Adds the visits of a step to the totals. All threads that joined the step have the same sequence of visits.
    // `prepared`: seconds that Program::prepare took.
    void end(int rows, double prepared, const ProgramShape& shape, const Kernels& kernels);

    void clear() { entries_.clear(); }
    const std::map<Key, ProfileEntry>& entries() const { return entries_; }

private:
    std::vector<std::vector<Visit>> visits_;  // [threads]
    std::map<Key, ProfileEntry> entries_;
};

}  // namespace headrace
