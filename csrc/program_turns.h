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
        std::atomic<int> first{0}, second{0};
    };

    Turn(Line* lines, int threads) : lines_(lines), threads_(threads) {}

    // f(first, last) for this thread's share of `items`, in any order; returns when all of them are done by whichever
    // thread, and what they wrote can be seen.
    template <class F>
    void share(int items, int thread, F f) {
        const int part = items * 4 / 5 / threads_, dealt = part * threads_;
        const int piece = std::max(1, part / 4), turn = std::max(1, (items - dealt) / (8 * threads_));
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

    // The same for items that differ much: f(item, next) one by one, every thread its own in turn, then those that others
    // have not come to. `next`: the item that the thread will come to next, or -1.
    template <class F>
    void deal(int items, int thread, F f) {
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

private:
    static constexpr int kLooks = 1000;  // some ten microseconds

    std::atomic<int>& queue(int thread) { return lines_[1 + thread].first; }
    std::atomic<int>& rest() { return lines_[0].first; }
    bool over(int items) const { return lines_[0].second.load(std::memory_order_acquire) >= items; }
    void finish(int count) {
        if (count > 0) lines_[0].second.fetch_add(count, std::memory_order_acq_rel);
    }

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
    Turn at(int turn) { return Turn(lines_.data() + turn * (threads_ + 1), threads_); }

private:
    std::vector<Turn::Line> lines_;
    int threads_ = 1;
};

}  // namespace headrace
