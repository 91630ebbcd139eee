// How the threads of a step share its work, phase after phase, without waiting for a thread that has lost its CPU.
//
// A turn is over when all its work is done, not when all threads have arrived: a thread that was away finds the work of
// many turns done and goes on to the one that is at hand. So threads only wait for work that one of them holds.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

namespace headrace {

// One piece of work for all threads. Most of it lies in a queue for each thread, the rest is for whoever comes first; a
// thread that has waited for a while helps with the queues of the others.
class Turn {
public:
    struct alignas(64) Line {
        std::atomic<int> count{0};
    };
    // Of a turn: what is left for all, what is done, and the threads' queues.
    static constexpr int lines(int threads) { return 2 + threads; }

    Turn(Line* lines, int threads) : lines_(lines), threads_(threads) {}

    // f(first, last) for this thread's share of `items`, in any order; returns when all of them are done by whichever
    // thread, and what they wrote can be seen. `grain`: so many items at a time, where fewer are not worth a look at
    // what is left: it may lie in another core's cache.
    template <class F>
    void share(int items, int thread, F f, int grain = 1) {
        grain = std::clamp(items / (4 * threads_), 1, grain);
        const int part = items * 4 / 5 / threads_, dealt = part * threads_;
        const int piece = std::max(grain, part / 4), turn = std::max(grain, (items - dealt) / (8 * threads_));
        fetch_next(thread);
        int count = take(queue(thread), thread * part, part, piece, f);
        count += take(rest(), dealt, items - dealt, turn, f);
        finish(count);
        for (int looks = 0; !over(items); ++looks) {
            if (looks < kLooks) {
                pause();
                continue;
            }
            count = 0;
            for (int other = 0; other < threads_; ++other) count += take(queue(other), other * part, part, piece, f);
            finish(count);
            if (count == 0) yield();
        }
    }

    // The same for items that differ much: f(item, next) one by one, every thread its own in turn, then those that
    // others have not come to. `next`: the item that the thread will come to next, or -1.
    template <class F>
    void deal(int items, int thread, F f) {
        fetch_next(thread);
        int count = 0;
        for (int i = 0; i < threads_; ++i) {
            const int owner = (thread + i) % threads_;
            for (int item = owner; item < items; ++count) {
                item = owner + queue(owner).fetch_add(1, std::memory_order_relaxed) * threads_;
                if (item >= items) break;
                f(item, item + threads_ < items ? item + threads_ : -1);
            }
        }
        finish(count);
        for (int looks = 0; !over(items); ++looks) looks < kLooks ? pause() : yield();
    }

    // Counts as done whatever is not: nobody waits for a thread that threw.
    void give_up() { done().store(kGivenUp, std::memory_order_release); }

private:
    static constexpr int kGivenUp = 1 << 30;  // more than there are items
    static constexpr int kLooks = 1000;       // some ten microseconds

    std::atomic<int>& rest() { return lines_[0].count; }
    std::atomic<int>& done() { return lines_[1].count; }
    std::atomic<int>& queue(int thread) { return lines_[2 + thread].count; }
    bool over(int items) { return done().load(std::memory_order_acquire) >= items; }
    void finish(int count) {
        if (count > 0) done().fetch_add(count, std::memory_order_acq_rel);
    }
    // The thread's queue in the next turn, which another thread has cleared.
    void fetch_next(int thread) const { __builtin_prefetch(lines_ + lines(threads_) + 2 + thread, 1); }

    // Pieces of [start, start + size) as long as there are any; how many items that was.
    template <class F>
    static int take(std::atomic<int>& next, int start, int size, int piece, F& f) {
        int count = 0;
        while (next.load(std::memory_order_relaxed) < size) {
            const int first = next.fetch_add(piece, std::memory_order_relaxed);
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
    const int threads_;
};

// The turns of a step, all new at its beginning.
class Turns {
public:
    void begin(int turns, int threads);
    Turn at(int turn) { return Turn(lines_.data() + turn * Turn::lines(threads_), threads_); }
    // For a thread that threw: the others come to the end of the step, whose results are worth nothing.
    void give_up() {
        for (int turn = 0; turn < turns_; ++turn) at(turn).give_up();
    }

private:
    std::vector<Turn::Line> lines_;
    int turns_ = 0;
    int threads_ = 1;
};

}  // namespace headrace
