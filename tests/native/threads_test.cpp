// Tests of thread pools and the turns of a step, also run under the sanitizers.
#include <pthread.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.h"
#include "missing_memory.h"
#include "program/turns.h"
#include "system/nodes.h"
#include "system/os.h"
#include "system/threadpool.h"

using namespace headrace;
using namespace headrace::test;

namespace {

// Every thread reads after a barrier the values that others wrote before it, without atomics.
void barriers(int threads) {
    ThreadPool pool(threads);
    std::vector<int> written(static_cast<size_t>(threads));
    std::atomic<int> wrong{0};
    for (int job = 0; job < 20; ++job) {
        pool.run([&](int thread) {
            for (int round = 1; round <= 10; ++round) {
                written[static_cast<size_t>(thread)] = job * 100 + round;
                pool.barrier(thread);
                for (const int value : written) wrong += value != job * 100 + round;
                pool.barrier(thread);
            }
        });
    }
    require(wrong == 0, "a barrier lets a thread through too early");
}

// Turns run each item once. The next turn sees the results, also on a thread that joined late.
void turns(int threads, bool late, int nodes = 0) {
    ThreadPool pool(threads);
    Turns turns;
    std::mt19937 rng(9);
    for (int step = 0; step < 20; ++step) {
        std::vector<int> sizes;
        for (int i = 0; i < 8; ++i) sizes.push_back(below(rng, 3) ? below(rng, 200) : below(rng, 3));
        std::vector<std::vector<int>> times;
        for (const int size : sizes) times.emplace_back(size, 0);
        std::atomic<int> wrong{0};
        turns.begin(static_cast<int>(sizes.size()), threads, nodes);
        pool.run([&](int thread) {
            if (late && thread == step % threads) std::this_thread::sleep_for(std::chrono::microseconds(200));
            for (size_t i = 0; i < sizes.size(); ++i) {
                const auto work = [&](int first, int last) {
                    for (int item = first; item < last; ++item) ++times[i][static_cast<size_t>(item)];
                    if (i > 0) {
                        for (const int count : times[i - 1]) wrong += count != 1;
                    }
                };
                Turn turn = turns.at(static_cast<int>(i));
                if (i % 3 != 2) {
                    turn.share(sizes[i], thread, work);
                    continue;
                }
                turn.deal(sizes[i], thread, [&](int item, int next) {
                    wrong += next != -1 && next != item + threads;
                    work(item, item + 1);
                });
            }
        });
        require(wrong == 0, "a turn began before the one before it was over");
        for (const auto& each : times) {
            for (const int count : each) require(count == 1, "an item was not done once");
        }
    }
}

// Concurrent callers of one pool run one after the other.
void callers() {
    ThreadPool pool(2);
    int inside = 0, jobs = 0;
    std::vector<std::thread> others;
    for (int i = 0; i < 3; ++i) {
        others.emplace_back([&] {
            for (int job = 0; job < 20; ++job) {
                pool.run([&](int thread) {
                    if (thread == 0) require(++inside == 1, "two jobs at once"), ++jobs, --inside;
                });
            }
        });
    }
    for (std::thread& each : others) each.join();
    require(jobs == 60, "a job was lost");
}

// Sleeping workers wake up for the next job; pools can be created and destroyed repeatedly.
void sleepers() {
    ThreadPool pool(3);
    pool.set_spin(1);
    for (int i = 0; i < 5; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        std::atomic<int> count{0};
        pool.run([&](int) { ++count; });
        require(count == 3, "a sleeping worker missed a job");
    }
    for (int i = 0; i < 20; ++i) ThreadPool(1 + i % 4, i % 2 == 0);
    require(throws([] { ThreadPool none(0); }) && throws([] { ThreadPool many(1025); }),
            "a pool of a size that cannot be");
}

// The caller gets the exception of a thread after the others are done; the next job is not affected.
void failures(int threads) {
    ThreadPool pool(threads);
    for (int thrower = 0; thrower < threads; ++thrower) {
        std::atomic<int> done{0};
        bool reported = false;
        try {
            pool.run([&](int thread) {
                if (thread == thrower) throw std::runtime_error("no more");
                ++done;
            });
        } catch (const std::runtime_error& error) {
            reported = std::string(error.what()) == "no more";
        }
        require(reported && done == threads - 1, "a job's exception did not reach its caller");
        done = 0;
        pool.run([&](int) { ++done; });
        require(done == threads, "a job that threw spoilt the next");
    }
}

// If a thread throws within a turn, the others do not wait for the items that it took.
void abandoned(int threads) {
    ThreadPool pool(threads);
    Turns turns;
    for (int step = 0; step < 20; ++step) {
        turns.begin(8, threads);
        std::atomic<bool> thrown{false};
        const auto work = [&](int turn, int first, int last) {
            if (turn == step % 8 && first <= 5 && 5 < last) thrown = true, throw std::bad_alloc();
        };
        require(throws([&] {
                    pool.run([&](int thread) {
                        try {
                            for (int turn = 0; turn < 8; ++turn)
                                turns.at(turn).share(20, thread, [&](int first, int last) { work(turn, first, last); });
                        } catch (...) {
                            turns.give_up();
                            throw;
                        }
                    });
                }),
                "a turn's exception did not reach the caller");
        require(thrown, "nothing was thrown");
    }
}

// After a fork, the parent's pool throws ForkedError in the child instead of waiting; the child can create a pool.
void forks() {
    auto pool = std::make_unique<ThreadPool>(2);
    pool->run([](int) {});
    const pid_t child = fork();
    if (child == 0) {
        bool reported = false;
        try {
            pool->run([](int) {});
        } catch (const ForkedError&) {
            reported = true;
        }
        pool.reset();
        _exit(reported ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked pool does not say so");
    std::atomic<int> count{0};
    pool->run([&](int) { ++count; });
    require(count == 2, "a fork broke the parent's pool");
}

#ifndef __SANITIZE_THREAD__  // it delays signals

std::atomic<bool> stopped{false}, go_on{false};

void stop_here(int) {
    stopped = true;
    while (!go_on) sched_yield();
}

// The system does not schedule a worker: kAvailable jobs end without it, and the caller's patience becomes 0. When the
// worker runs again, it takes part again.
void without_a_worker() {
    constexpr int kItems = 100, kTurns = 50;
    ThreadPool pool(2);
    Turns turns;
    pthread_t worker{};
    pool.run([&](int thread) {
        if (thread == 1) worker = pthread_self();
    });
    const auto step = [&] {
        std::atomic<int> done{0};
        int workers = 0;
        turns.begin(kTurns, 2);
        const auto part = [&](int thread) {
            workers += thread;
            for (int turn = 0; turn < kTurns; ++turn)
                turns.at(turn).share(kItems, thread, [&](int first, int last) { done += last - first; });
        };
        pool.run(part, ThreadPool::Crew::kAvailable);
        require(done == kItems * kTurns, "an item was not done once");
        return workers;
    };
    std::signal(SIGUSR1, stop_here);
    pthread_kill(worker, SIGUSR1);
    while (!stopped) sched_yield();
    for (int i = 0; i < 3; ++i) require(step() == 0, "a stopped worker took part");
    require(turns.waits(0) == 0, "the caller did not learn that its worker is away");
    go_on = true;
    while (turns.waits(0) == 0) {  // until both threads work in the same turn
        std::atomic<bool> there{false};
        turns.begin(1, 2);
        pool.run([&](int thread) {
            turns.at(0).share(kItems, thread, [&](int, int) {
                if (thread == 1) there = true;
                while (!there) sched_yield();
            });
        });
    }
    std::signal(SIGUSR1, SIG_DFL);
}

#endif

// A turn that waited long for one thread makes every thread yield between later turns; without such a turn none yields.
void yields_while_contended() {
    constexpr int kTurns = 400;
    ThreadPool pool(2);
    for (const bool contended : {false, true}) {
        std::atomic<bool> away{!contended};
        Turns turns;
        turns.begin(kTurns, contended ? 2 : 1);
        const auto part = [&](int thread) {
            if (thread > 0 && !contended) return;
            for (int turn = 0; turn < kTurns; ++turn) {
                turns.at(turn).share(20, thread, [&](int, int) {
                    if (thread == 1 && !away.exchange(true)) std::this_thread::sleep_for(std::chrono::milliseconds(20));
                    while (!away) sched_yield();
                    std::this_thread::sleep_for(std::chrono::microseconds(5));
                });
            }
        };
        pool.run(part);
        require((turns.yields(0) > 0) == contended, contended ? "no thread yielded" : "a thread yielded for nothing");
        if (contended) require(turns.yields(1) > 0, "the descheduled thread did not yield later");
    }
}

// Out of memory while starting threads gives the same error as a refusal by the system.
void without_memory() {
    for (const int at : {1, 2, 3, 5, 8}) {
        left_to_allocate = at;
        bool reported = false;
        try {
            ThreadPool pool(8);
        } catch (const ThreadsError& error) {
            reported = std::string(error.what()).find("could be started (out of memory)") != std::string::npos;
        } catch (const std::bad_alloc&) {
            reported = at <= 3;  // the pool's own memory
        }
        left_to_allocate = -1;
        require(reported, "a thread without memory is not said to be one");
    }
}

// A machine with more CPUs than a cpu_set_t has bits.
int ask_large_machine(size_t bytes, void* mask) {
    if (bytes < 512) {
        errno = EINVAL;
        return -1;
    }
    CPU_SET_S(3, bytes, static_cast<cpu_set_t*>(mask));
    CPU_SET_S(2500, bytes, static_cast<cpu_set_t*>(mask));
    return 0;
}

void large_machines() {
    require(os::allowed_cpus(ask_large_machine) == std::vector<int>{3, 2500}, "CPUs beyond 1024 are not found");
    require(os::page_start(0x12345, 4096) == 0x12000 && os::page_start(0x12345, 65536) == 0x10000,
            "a page does not start at a multiple of its size");
}

// Nodes divide items in order and threads in groups. Every item is in one queue, each queue has items of one node, and
// the part of a node is the one that Packer places there, within a row block.
void dealing() {
    for (int threads = 1; threads <= 16; ++threads) {
        for (int nodes = 1; nodes <= std::min(threads, 4); ++nodes) {
            for (const int items : {0, 1, 7, 100, 4096, 75969}) {
                int item = 0, thread = 0;
                for (int node = 0; node < nodes; ++node) {
                    const Turn::Dealt dealt = Turn::dealt(items, threads, node, nodes);
                    require(dealt.begin == item && dealt.first_thread == thread, "a node does not follow the last one");
                    require(dealt.part >= 0 && dealt.rest_size >= 0, "a queue has a negative size");
                    require(dealt.rest == dealt.start(thread + dealt.threads), "the rest does not follow the queues");
                    if (threads % nodes == 0) {
                        const auto first = static_cast<int>(first_of_node(items, node, nodes));
                        require(std::abs(dealt.begin - first) <= 1, "threads and memory do not agree");
                    }
                    thread += dealt.threads;
                    item = dealt.rest + dealt.rest_size;
                }
                require(item == items && thread == threads, "items or threads are left over");
            }
        }
    }
}

// The items that thread 0 of 4 takes, in order, while no other thread runs.
std::vector<int> order_of_a_lone_thread(int items, int nodes) {
    Turns turns;
    turns.begin(1, 4, nodes);
    std::vector<int> order;
    turns.at(0).share(items, 0, [&](int first, int last) {
        for (int item = first; item < last; ++item) order.push_back(item);
    });
    return order;
}

// A thread takes items of another node when its own node has none that wait in the shared queue. Control: with one node
// it takes items of the second half earlier.
void own_node_first() {
    constexpr int kItems = 200;
    const auto switches = [](const std::vector<int>& order) {
        const Turn::Dealt dealt = Turn::dealt(kItems, 4, 0, 2);
        int own = 0;
        while (own < kItems && order[static_cast<size_t>(own)] < kItems / 2) ++own;
        return own >= dealt.part + dealt.rest_size;
    };
    for (const int nodes : {1, 2, 4}) {
        std::vector<int> order = order_of_a_lone_thread(kItems, nodes);
        if (nodes < 4) require(switches(order) == (nodes == 2), "a thread does not take the items of its node first");
        std::sort(order.begin(), order.end());
        for (int item = 0; item < kItems; ++item)
            require(order[static_cast<size_t>(item)] == item, "an item was not done once");
    }
}

// Nodes as the system reports them, cut by the affinity mask, or pretended; borders of a tensor on whole pages.
void memory_nodes() {
    char folder[] = "/tmp/nodesXXXXXX";
    require(mkdtemp(folder) != nullptr, "no folder");
    const std::string root = folder;
    const char* const lists[] = {"0-2,8", "3-5", "6"};
    for (int node = 0; node < 3; ++node) {
        mkdir((root + "/node" + std::to_string(node)).c_str(), 0700);
        std::ofstream(root + "/node" + std::to_string(node) + "/cpulist") << lists[node] << "\n";
    }
    const auto found = os::find_nodes({1, 2, 4, 8}, 0, root);
    require(found.size() == 2 && found[0].number == 0 && found[1].number == 1, "not the nodes with allowed CPUs");
    require(found[0].cpus == std::vector<int>{1, 2, 8} && found[1].cpus == std::vector<int>{4}, "not their CPUs");
    require(os::find_nodes({1, 2}, 0, root + "/missing").size() == 1, "a system without nodes has one");
    const auto pretended = os::find_nodes({1, 2, 4}, 2, root);
    require(pretended.size() == 2 && pretended[0].cpus.size() + pretended[1].cpus.size() == 3, "not two equal parts");
    require(pretended[0].number == -1, "a pretended node has memory");
    require(os::find_nodes({1}, 2, root)[1].cpus == std::vector<int>{1}, "a node has no CPU");
    for (int node = 0; node < 3; ++node) {
        std::remove((root + "/node" + std::to_string(node) + "/cpulist").c_str());
        rmdir((root + "/node" + std::to_string(node)).c_str());
    }
    rmdir(folder);

    const auto* data = reinterpret_cast<const uint8_t*>(uintptr_t{5} << 20);
    require(node_borders(data, 1000, 1000, 2).empty() && node_borders(data, 1 << 20, 64, 1).empty(), "a part moves");
    const auto borders = node_borders(data, 1 << 20, 64, 4);
    require(borders.size() == 5 && borders.front() == uintptr_t{5} << 20 && borders.back() == uintptr_t{69} << 20,
            "the parts are not the tensor");
    for (size_t node = 1; node < 4; ++node) {
        require(borders[node] % (2 << 20) == 0 && borders[node] > borders[node - 1], "a border is not one of pages");
        require((uintptr_t{5 + 16 * node} << 20) - borders[node] < 2 << 20, "a border is not near its row block");
    }
}

// Pinned workers run on allowed CPUs; default_threads respects the affinity mask and the quota.
void limits() {
    const std::vector<int> allowed = os::allowed_cpus();
    require(!allowed.empty(), "no CPU is allowed");
    cpu_set_t one, before;
    sched_getaffinity(0, sizeof before, &before);
    CPU_ZERO(&one);
    CPU_SET(allowed.back(), &one);
    sched_setaffinity(0, sizeof one, &one);
    require(os::allowed_cpus() == std::vector<int>{allowed.back()} && default_threads() == 1,
            "the affinity mask is not kept");
    ThreadPool pinned(3, true);
    std::atomic<int> elsewhere{0};
    pinned.run([&](int) { elsewhere += sched_getcpu() != allowed.back(); });
    require(elsewhere == 0, "a worker runs outside the affinity mask");
    sched_setaffinity(0, sizeof before, &before);
    require(default_threads() <= static_cast<int>(allowed.size()), "more threads than CPUs");
    require(os::quota("/none", "/none") == 0, "a quota where there is none");
    require(default_threads(0.5) == 1 && default_threads(1.74) == 1, "more threads than a quota has whole CPUs");
    require(default_threads(1.75) == std::min(2, default_threads(0)), "fewer threads than a quota is worth");
}

}  // namespace

int main() {
    for (const int threads : {1, 2, 3, 5}) {
        barriers(threads);
        turns(threads, false);
        turns(threads, true);
        for (const int nodes : {2, 3}) turns(threads, true, nodes);
        failures(threads);
        abandoned(threads);
    }
    callers();
    sleepers();
    yields_while_contended();
    without_memory();
    large_machines();
    dealing();
    own_node_first();
    memory_nodes();
#ifndef __SANITIZE_THREAD__
    without_a_worker();
#endif
    forks();
    limits();
    std::puts("threads: ok");
    return 0;
}
