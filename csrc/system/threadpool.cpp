#include "system/threadpool.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <system_error>
#include <utility>

#include "system/nodes.h"
#include "system/pause.h"

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPausesPerLook = 32;
constexpr int kSleepFactor = 6;

// Number of forks since the first pool was created.
std::atomic<unsigned>& forks() {
    static std::atomic<unsigned> count{0};
    static const bool registered = (os::on_fork([] { forks().fetch_add(1); }), true);
    (void)registered;
    return count;
}

// Spins, then yields: after 500 spins the other thread is probably descheduled. Never sleeps.
void wait_for(const std::atomic<uint32_t>& word, uint32_t value) {
    for (int spins = 0; word.load(std::memory_order_acquire) != value; ++spins) {
        if (spins < 500) {
            pause_thread();
        } else {
            std::this_thread::yield();
        }
    }
}

int checked(int threads) {
    if (threads < 1 || threads > 1024) {
        throw std::invalid_argument("a thread pool has 1 to 1024 threads, not " + std::to_string(threads));
    }
    return threads;
}

}  // namespace

int default_threads(double quota) {
    int threads = std::max(1, os::cores(os::allowed_cpus()));
    if (quota > 0) threads = std::min(threads, std::max(1, static_cast<int>(std::floor(quota + 0.25))));
    return threads;
}

ThreadPool::ThreadPool(int threads, bool pin)
    : size_(checked(threads)),
      generation_(forks().load()),
      slots_(threads),
      workers_(std::make_unique<std::vector<std::thread>>()) {
    const std::vector<int> cpus = pin ? os::allowed_cpus() : std::vector<int>{};
    const std::vector<os::Node>& nodes = os::nodes();
    const int count = std::min(static_cast<int>(nodes.size()), threads);
    workers_->reserve(threads - 1);
    try {
        for (int thread = 1; thread < threads; ++thread) {
            workers_->emplace_back([this, thread] { work(thread); });
            if (!cpus.empty()) {
                os::pin(workers_->back(), cpus[thread % cpus.size()]);
            } else if (count > 1) {  // the first threads on the first node, as Turn deals and Packer places
                os::pin(workers_->back(), nodes[static_cast<size_t>(int64_t{thread} * count / threads)].cpus);
            }
        }
    } catch (const std::exception& error) {  // std::system_error, or std::bad_alloc
        const size_t started = workers_->size() + 1;
        stop();
        const auto* refused = dynamic_cast<const std::system_error*>(&error);
        throw ThreadsError("only " + std::to_string(started) + " of " + std::to_string(threads) +
                           " threads could be started (" + (refused ? refused->code().message() : "out of memory") +
                           "); ask for fewer threads, or let the process have more (ulimit -u, the container's limit "
                           "of processes)");
    }
}

ThreadPool::~ThreadPool() {
    if (forked()) {
        workers_.release();  // threads of the parent: joining or freeing them is invalid
        return;
    }
    stop();
}

void ThreadPool::stop() {
    stop_.store(true, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (std::thread& worker : *workers_) worker.join();
}

bool ThreadPool::forked() const { return forks().load(std::memory_order_relaxed) != generation_; }

void ThreadPool::run(Job job, void* context, Crew crew) {
    if (forked()) {
        throw ForkedError(
            "this process was forked after the native core had started its threads; start it with spawn or "
            "forkserver, or load the model after the fork");
    }
    const std::lock_guard<std::mutex> turn(turn_);
    job_ = job;
    context_ = context;
    crew_ = crew;
    finished_.store(0, std::memory_order_relaxed);
    if (size_ > 1) {
        const uint32_t number = epoch_.load(std::memory_order_relaxed) + 1;
        gate_.store(uint64_t{number} << 32 | kOpen, std::memory_order_release);
        epoch_.store(number, std::memory_order_release);
        epoch_.notify_all();
    }
    call(0);
    if (crew == Crew::kAll) wait_for(finished_, static_cast<uint32_t>(size_ - 1));
    const uint64_t joined = gate_.exchange(0, std::memory_order_acq_rel) & (kOpen - 1);
    wait_for(finished_, static_cast<uint32_t>(joined));
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

// Runs this thread's part of the job; keeps its exception.
void ThreadPool::call(int thread) {
    try {
        job_(context_, thread);
    } catch (...) {
        const std::lock_guard<std::mutex> turn(failure_turn_);
        if (!failure_) failure_ = std::current_exception();
    }
}

void ThreadPool::barrier(int thread) {
    const uint32_t count = slots_[thread].arrived.load(std::memory_order_relaxed) + 1;
    if (thread != 0) {
        slots_[thread].arrived.store(count, std::memory_order_release);
        wait_for(released_, count);
        return;
    }
    for (int other = 1; other < size_; ++other) wait_for(slots_[other].arrived, count);
    slots_[0].arrived.store(count, std::memory_order_relaxed);
    released_.store(count, std::memory_order_release);
}

void ThreadPool::work(int thread) {
    for (uint32_t seen = 0, joined = 0;;) {
        seen = next_epoch(seen);
        if (stop_.load(std::memory_order_relaxed)) return;
        if (!join(joined)) continue;
        call(thread);
        finished_.fetch_add(1, std::memory_order_release);
    }
}

// Joins the open job, unless this worker has joined it before.
bool ThreadPool::join(uint32_t& joined) {
    uint64_t gate = gate_.load(std::memory_order_acquire);
    do {
        if (!(gate & kOpen) || gate >> 32 == joined) return false;
    } while (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    joined = static_cast<uint32_t>(gate >> 32);
    return true;
}

// Waits for a job after number `seen`: spins, then yields, then sleeps.
uint32_t ThreadPool::next_epoch(uint32_t seen) {
    const auto start = Clock::now();
    const auto spin = std::chrono::microseconds(spin_us_.load(std::memory_order_relaxed));
    for (;;) {
        for (int i = 0; i < kPausesPerLook; ++i) {
            const uint32_t now = epoch_.load(std::memory_order_acquire);
            if (now != seen) return now;
            pause_thread();
        }
        const auto idle = Clock::now() - start;
        if (idle > spin * kSleepFactor) {
            epoch_.wait(seen, std::memory_order_acquire);
        } else if (idle > spin) {
            std::this_thread::yield();
        }
    }
}

}  // namespace headrace
