// How the threads of a step share its work, phase after phase.
//
// A turn ends when all of its items are done, not when all threads have arrived. A thread that lost its CPU between two
// items delays nothing: the others do its part, and it passes the finished turns when it is back. A thread that lost
// its CPU inside an item delays the turn, because no other thread can finish that item.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace headrace {

// One piece of work for all threads. Four fifths of the items lie in a queue for each thread, the rest in a queue for
// all. A thread that has nothing left to do takes over the queues of the threads that have not arrived.
class Turn {
public:
    static constexpr int kLooks = 1000;   // 10 to 50 microseconds
    static constexpr int kFewLooks = 64;  // before a thread without patience yields

    // A count, and in the high half the step that it belongs to. A count of an earlier step stands for 0.
    struct alignas(64) Line {
        std::atomic<uint64_t> count{0};
    };
    // Lines of a turn: the rest and the items that are done, which are of this step, then the threads' queues.
    static constexpr int lines(int threads) { return 2 + threads; }

    // A thread of the step, from turn to turn.
    struct alignas(64) Peer {
        std::atomic<uint64_t> place{0};  // the step, and in the low half the turn that it has reached
        // Looks until it does the others' work or yields: kLooks, or 0 once another thread has lost its CPU, until
        // that one takes part again.
        int patience = kLooks;
    };

    Turn(Line* lines, Peer* peers, int threads, uint32_t step, int number)
        : lines_(lines), peers_(peers), threads_(threads), step_(uint64_t{step} << 32), number_(number) {}

    // f(first, last) for this thread's share of `items`, in any order. Returns when all items are done by whichever
    // thread; what they wrote is visible then. `grain`: the fewest items worth one access to a queue, which may lie in
    // another core's cache.
    template <class F>
    void share(int items, int thread, F f, int grain = 1) {
        grain = std::clamp(items / (4 * threads_), 1, grain);
        const int part = items * 4 / 5 / threads_, dealt = part * threads_;
        const int piece = std::max(grain, part / 4), turn = std::max(grain, (items - dealt) / (8 * threads_));
        arrive(thread);
        int count = take(queue(thread), thread * part, part, piece, f);
        count += take(rest(), dealt, items - dealt, turn, f);
        finish(count);
        bool absent = false;
        const auto help = [&](bool first) {
            if (first) absent = part > 0 && !all_arrived();
            int helped = 0;
            for (int other = 0; other < threads_; ++other) helped += take(queue(other), other * part, part, piece, f);
            finish(helped);
            return helped > 0;
        };
        const int looks = wait(items, thread, help);
        int& patience = peers_[thread].patience;
        if (absent || looks > kLooks)
            patience = 0;
        else if (part > 0)
            patience = kLooks;
    }

    // The same for items that differ much: f(item, next) one by one. A thread takes its own items in turn, then those
    // that other threads have not taken. `next`: the item that the thread takes next, or -1.
    template <class F>
    void deal(int items, int thread, F f) {
        arrive(thread);
        int count = 0;
        for (int i = 0; i < threads_; ++i) {
            const int owner = (thread + i) % threads_;
            for (int item = owner; item < items; ++count) {
                item = owner + add(queue(owner), 1) * threads_;
                if (item >= items) break;
                f(item, item + threads_ < items ? item + threads_ : -1);
            }
        }
        finish(count);
        wait(items, thread, [](bool) { return false; });
    }

    // Marks every item as done, so that no thread waits for one that threw.
    void give_up() { done().store(step_ | kGivenUp, std::memory_order_release); }

private:
    static constexpr int kGivenUp = 1 << 30;  // more than there are items

    std::atomic<uint64_t>& rest() { return lines_[0].count; }
    std::atomic<uint64_t>& done() { return lines_[1].count; }
    std::atomic<uint64_t>& queue(int thread) { return lines_[2 + thread].count; }

    // A line's count in this step.
    int value(const std::atomic<uint64_t>& line, std::memory_order order = std::memory_order_relaxed) const {
        const uint64_t seen = line.load(order);
        return seen >> 32 == step_ >> 32 ? static_cast<int>(seen & 0xffffffff) : 0;
    }
    // Adds to it; returns the count before.
    int add(std::atomic<uint64_t>& line, int count) {
        constexpr auto relaxed = std::memory_order_relaxed;
        uint64_t seen = line.load(relaxed);
        while (seen >> 32 != step_ >> 32) {
            if (line.compare_exchange_weak(seen, step_ | static_cast<uint32_t>(count), relaxed)) return 0;
        }
        return static_cast<int>(line.fetch_add(static_cast<uint32_t>(count), relaxed) & 0xffffffff);
    }
    bool over(int items) { return value(done(), std::memory_order_acquire) >= items; }
    void finish(int count) {
        if (count > 0) done().fetch_add(static_cast<uint32_t>(count), std::memory_order_acq_rel);
    }
    void arrive(int thread) {
        peers_[thread].place.store(step_ + static_cast<uint32_t>(number_), std::memory_order_relaxed);
        // The thread's queue in the next turn.
        __builtin_prefetch(lines_ + lines(threads_) + 2 + thread, 1);
    }
    bool arrived(int thread) const {
        return peers_[thread].place.load(std::memory_order_relaxed) >= step_ + static_cast<uint32_t>(number_);
    }

    bool all_arrived() const {
        for (int other = 0; other < threads_; ++other) {
            if (!arrived(other)) return false;
        }
        return true;
    }

    // Waits until all items are done. Once the thread's patience is over it helps, as long as there is something to do,
    // then it yields. Returns the number of looks.
    template <class F>
    int wait(int items, int thread, F help) {
        const int patience = peers_[thread].patience;
        int looks = 0;
        for (; !over(items); ++looks) {
            if (looks < patience) {
                pause();
            } else if (!help(looks == patience)) {
                looks < kFewLooks ? pause() : yield();
            }
        }
        return looks;
    }

    // Takes pieces of [start, start + size) until none is left; returns the number of items.
    template <class F>
    int take(std::atomic<uint64_t>& next, int start, int size, int piece, F& f) {
        int count = 0;
        while (value(next) < size) {
            const int first = add(next, piece);
            if (first >= size) break;
            const int last = std::min(first + piece, size);
            f(start + first, start + last);
            count += last - first;
        }
        return count;
    }

    static void pause();
    static void yield();

    Line* const lines_;
    Peer* const peers_;  // [threads]
    const int threads_;
    const uint64_t step_;  // in the high half
    const int number_;     // of the turn
};

// The turns of a step, all new at its beginning. What threads learned about each other stays.
class Turns {
public:
    void begin(int turns, int threads);
    Turn at(int turn) {
        return Turn(lines_.data() + turn * Turn::lines(threads_), peers_.data(), threads_, step_, turn);
    }
    // Looks that a thread waits for others before it does their work. For tests.
    int waits(int thread) const { return peers_[static_cast<size_t>(thread)].patience; }
    // Called by a thread that threw: the others reach the end of the step, whose results are void.
    void give_up() {
        for (int turn = 0; turn < turns_; ++turn) at(turn).give_up();
    }

private:
    std::vector<Turn::Line> lines_;
    std::vector<Turn::Peer> peers_;  // [threads]
    uint32_t step_ = 0;
    int turns_ = 0;
    int threads_ = 1;
};

}  // namespace headrace
