// Work distribution among the threads of a step. A step is a sequence of turns; each phase takes one or two.
//
// A turn ends when all its items are done, not when all threads have arrived. A thread that is descheduled between two
// items delays nothing: the other threads process its items, and it skips the finished turns when it runs again. A
// thread that is descheduled inside an item delays the turn, because no other thread can finish that item. While other
// processes use the cores, each thread therefore yields its core between two turns before its time slice ends.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "system/nodes.h"

namespace headrace {

// One parallel loop over items. Each thread has its own queue; together these queues hold four fifths of the items. The
// rest is in a queue shared by all threads. A thread that runs out of items takes items from the queues of the others.
//
// With several memory nodes the items are divided in order among them, as Packer places the rows of a weight matrix,
// and each node has threads next to each other and a queue with the rest of its items. A thread takes items of another
// node when its own node has none.
class Turn {
public:
    static constexpr int kLooks = 1000;   // polls, 10 to 50 microseconds
    static constexpr int kFewLooks = 64;  // polls before a thread with patience 0 yields
    // Steps for which the threads yield after a turn that waited longer than kLooks.
    static constexpr uint32_t kContendedSteps = 64;
    // Longest run of a thread on a contended core: shorter than the time slice of Linux (4 ms at 250 Hz).
    static constexpr std::chrono::nanoseconds kLongestRun = std::chrono::milliseconds(1);

    // A counter in the low half and its step number in the high half. A counter of an earlier step counts as 0.
    struct alignas(64) Line {
        std::atomic<uint64_t> count{0};
    };
    // Lines of a turn: the shared queue, the number of finished items, one queue per thread, then the shared queues of
    // further nodes. `Turns::begin` resets the first two at each step; other queues are reset by their first use.
    static constexpr int lines(int threads, int nodes) { return 1 + threads + nodes; }

    // The items and the threads of a node. part: items of each thread's queue; the rest follows them.
    struct Dealt {
        int first_thread, threads;
        int begin, part, rest, rest_size;

        int start(int thread) const { return begin + (thread - first_thread) * part; }
    };
    static Dealt dealt(int items, int threads, int node, int nodes) {
        if (nodes == 1) {
            const int part = items * 4 / 5 / threads;
            return {0, threads, 0, part, part * threads, items - part * threads};
        }
        const auto first = static_cast<int>(first_of_node(threads, node, nodes));
        const auto last = static_cast<int>(first_of_node(threads, node + 1, nodes));
        const auto begin = static_cast<int>(int64_t{items} * first / threads);
        const auto end = static_cast<int>(int64_t{items} * last / threads);
        const int part = (end - begin) * 4 / 5 / (last - first), rest = begin + part * (last - first);
        return {first, last - first, begin, part, rest, end - rest};
    }

    // State of one thread, kept across turns.
    struct alignas(64) Peer {
        std::atomic<uint64_t> place{0};  // step in the high half, in the low half the turn that the thread has reached
        // Polls before the thread takes items of others or yields: kLooks, or 0 while another thread is descheduled.
        int patience = kLooks;
        // In contended steps: the start of the thread's run on its core, its last turn, and its number of yields.
        std::chrono::steady_clock::time_point run_start, last_turn;
        int yields = 0;
    };

    // contended_until: the first step in which the threads need not yield. Any thread raises it.
    // nodes: at most `threads`.
    Turn(Line* lines, Peer* peers, std::atomic<uint32_t>& contended_until, int threads, int nodes, uint32_t step,
         int number)
        : lines_(lines),
          peers_(peers),
          contended_until_(contended_until),
          threads_(threads),
          nodes_(nodes),
          step_(uint64_t{step} << 32),
          number_(number) {}

    // Calls f(first, last) for this thread's share of `items`, in any order. Returns when all items are done, whichever
    // thread ran them; their writes are visible then. `grain`: smallest number of items to take from a queue at once,
    // because the queue's cache line may be in another core's cache.
    template <class F>
    void share(int items, int thread, F f, int grain = 1) {
        grain = std::clamp(items / (4 * threads_), 1, grain);
        const int home = static_cast<int>(int64_t{thread} * nodes_ / threads_);
        const Dealt own = at_node(items, home);
        const int part = own.part;
        arrive(thread);
        if (contended_until_.load(std::memory_order_relaxed) > step_ >> 32) yield_before_slice_ends(peers_[thread]);
        int count = take(queue(thread), own.start(thread), part, std::max(grain, part / 4), f);
        for (int i = 0; i < nodes_; ++i) {
            const int node = i ? (home + i) % nodes_ : home;
            const Dealt dealt = i ? at_node(items, node) : own;
            const int turn = std::max(grain, dealt.rest_size / (8 * dealt.threads));
            count += take(rest(node), dealt.rest, dealt.rest_size, turn, f);
        }
        finish(count);
        bool absent = false;
        const auto help = [&](bool first) {
            if (first) absent = part > 0 && !all_arrived();
            int helped = 0;
            for (int i = 0; i < nodes_; ++i) {
                const Dealt dealt = at_node(items, (home + i) % nodes_);
                const int piece = std::max(grain, dealt.part / 4);
                for (int other = dealt.first_thread; other < dealt.first_thread + dealt.threads; ++other)
                    helped += take(queue(other), dealt.start(other), dealt.part, piece, f);
            }
            finish(helped);
            return helped > 0;
        };
        const int looks = wait(items, thread, help);
        if (looks > kLooks) {
            contended_until_.store(static_cast<uint32_t>(step_ >> 32) + kContendedSteps, std::memory_order_relaxed);
        }
        int& patience = peers_[thread].patience;
        if (absent || looks > kLooks)
            patience = 0;
        else if (part > 0)
            patience = kLooks;
    }

    // Like `share`, for items of very different cost: calls f(item, next) for one item at a time. A thread takes its
    // own items in order, then the remaining items of the other threads. `next`: the item that it will probably take
    // next, or -1.
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

    // Marks every item as done, so that no thread waits for a thread that threw an exception.
    void give_up() { done().store(step_ | kGivenUp, std::memory_order_release); }

private:
    static constexpr int kGivenUp = 1 << 30;  // above any number of items

    Dealt at_node(int items, int node) const { return dealt(items, threads_, node, nodes_); }
    std::atomic<uint64_t>& rest(int node) { return lines_[node ? 1 + threads_ + node : 0].count; }
    std::atomic<uint64_t>& done() { return lines_[1].count; }
    std::atomic<uint64_t>& queue(int thread) { return lines_[2 + thread].count; }

    // The line's counter, or 0 if it is of an earlier step.
    int value(const std::atomic<uint64_t>& line, std::memory_order order = std::memory_order_relaxed) const {
        const uint64_t seen = line.load(order);
        return seen >> 32 == step_ >> 32 ? static_cast<int>(seen & 0xffffffff) : 0;
    }
    // Adds to the line's counter and returns the counter before.
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
        // Prefetch for writing: the thread's queue of the next turn.
        __builtin_prefetch(lines_ + lines(threads_, nodes_) + 2 + thread, 1);
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

    // Polls until all items are done and returns the number of polls. After `patience` polls the thread processes items
    // of the other threads; when none remains it yields between polls.
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

    // Takes pieces of [start, start + size) from the queue until it is empty; returns the number of items taken.
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
    static void yield_before_slice_ends(Peer& peer);

    Line* const lines_;
    Peer* const peers_;  // [threads]
    std::atomic<uint32_t>& contended_until_;
    const int threads_, nodes_;
    const uint64_t step_;  // step number, in the high half
    const int number_;     // turn number within the step
};

// The turns of a step. `begin` resets them; the threads' patience is kept across steps.
class Turns {
public:
    // nodes: memory nodes, 0: those of this process; not more than `threads` are used.
    void begin(int turns, int threads, int nodes = 0);
    Turn at(int turn) {
        return Turn(lines_.data() + turn * Turn::lines(threads_, nodes_), peers_.data(), contended_until_, threads_,
                    nodes_, step_, turn);
    }
    // Current patience of a thread (Peer::patience). For tests.
    int waits(int thread) const { return peers_[static_cast<size_t>(thread)].patience; }
    // Number of times that a thread yielded before its time slice ended. For tests.
    int yields(int thread) const { return peers_[static_cast<size_t>(thread)].yields; }
    // Called by a thread that threw an exception: the others reach the end of the step, whose results are invalid.
    void give_up() {
        for (int turn = 0; turn < turns_; ++turn) at(turn).give_up();
    }

private:
    std::vector<Turn::Line> lines_;
    std::vector<Turn::Peer> peers_;  // [threads]
    alignas(64) std::atomic<uint32_t> contended_until_{0};
    uint32_t step_ = 0;
    int turns_ = 0;
    int threads_ = 1, nodes_ = 1;
};

}  // namespace headrace
