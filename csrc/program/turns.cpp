#include "program/turns.h"

#include <thread>

#include "system/pause.h"

namespace headrace {

void Turn::pause() { pause_thread(); }

void Turn::yield() { std::this_thread::yield(); }

// Yields if the thread has run for kLongestRun. A gap of that length between two turns counts as time off the core.
void Turn::yield_before_slice_ends(Peer& peer) {
    const auto now = std::chrono::steady_clock::now();
    if (now - peer.last_turn > kLongestRun) peer.run_start = now;
    peer.last_turn = now;
    if (now - peer.run_start < kLongestRun) return;
    yield();
    ++peer.yields;
    peer.run_start = peer.last_turn = std::chrono::steady_clock::now();
}

void Turns::begin(int turns, int threads, int nodes) {
    if (peers_.size() != static_cast<size_t>(threads)) peers_ = std::vector<Turn::Peer>(static_cast<size_t>(threads));
    threads_ = threads, nodes_ = std::min(nodes ? nodes : static_cast<int>(os::nodes().size()), threads),
    turns_ = turns;
    const size_t lines = static_cast<size_t>(turns + 1) *
                         static_cast<size_t>(Turn::lines(threads, nodes_));  // one more for Turn::arrive
    if (++step_ == 0) {  // the step number wrapped: counters of old steps would look current
        lines_.clear();
        contended_until_ = 0;
        step_ = 1;
    }
    if (lines_.size() < lines) lines_ = std::vector<Turn::Line>(lines);
    for (int turn = 0; turn < turns; ++turn) {
        Turn::Line* line = lines_.data() + turn * Turn::lines(threads, nodes_);
        line[0].count.store(uint64_t{step_} << 32, std::memory_order_relaxed);
        line[1].count.store(uint64_t{step_} << 32, std::memory_order_relaxed);
    }
}

}  // namespace headrace
