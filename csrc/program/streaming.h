// Layer offload: packed weights that stay in a file while a program runs.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "system/arena.h"

namespace headrace {

// Reads the weights of the next unit while the threads compute the current one, and releases computed units.
//
// A unit is a part of the weights that a step reads at one time: unit 0 are the tables of embed, whose rows are looked
// up, then one unit per layer, then the head. Some units are held in memory. Of the others at most two are resident:
// the current one and the next. One thread reads and releases.
class Streaming {
public:
    using Unit = std::vector<std::span<const uint8_t>>;  // parts that do not overlap

    struct Stats {
        uint64_t fetched = 0;  // bytes read, held units included
        double reading = 0;    // seconds of these reads
        uint64_t missed = 0;   // units that a step reached while another one was being read for it
        double waited = 0;     // seconds for which steps waited for a unit
    };

    // Reads the held units. `held`: by unit; unit 0 counts as held if it is empty. Tests pass other values of `ahead`,
    // the number of units from the current one to the one that is read, and of `release`.
    Streaming(std::shared_ptr<Arena> arena, std::vector<Unit> units, std::vector<bool> held, int ahead = 1,
              bool release = true);
    ~Streaming();
    Streaming(const Streaming&) = delete;
    Streaming& operator=(const Streaming&) = delete;

    // Called when a step reaches a unit and all work on the units before it is done. Returns when the unit is in
    // memory. `last`: the last unit of the step.
    void enter(int unit, int last);

    int units() const { return static_cast<int>(units_.size()); }
    Stats stats() const;

private:
    enum class State { kAway, kComing, kThere };

    bool streamed(int unit) const { return unit > 0 && !held_[static_cast<size_t>(unit)]; }
    int next(int unit, int last) const;
    void read(int unit, std::unique_lock<std::mutex>& lock);
    void release(int unit, std::unique_lock<std::mutex>& lock);
    void work();

    const std::shared_ptr<Arena> arena_;
    const std::vector<Unit> units_;
    const std::vector<bool> held_;
    const int ahead_;
    const bool release_;
    const int process_;  // that started the thread
    mutable std::mutex turn_;
    std::condition_variable entered_, arrived_;
    std::vector<State> states_;
    int current_ = 0;
    int following_;  // the unit that is read while the current one computes
    uint64_t entries_ = 0;
    bool stop_ = false;
    Stats stats_;
    std::unique_ptr<std::thread> thread_;
};

}  // namespace headrace
