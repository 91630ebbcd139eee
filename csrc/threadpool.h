// The threads of the native core: the caller and n - 1 workers that run one job together, with barriers inside it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "os.h"

namespace headrace {

// The process was forked: the pool's workers are in the parent only.
struct ForkedError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The system did not start as many threads as were asked for.
struct ThreadsError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// One thread for each core that the affinity mask reaches, no more than the quota, which is rounded to the nearest and
// is one thread at least.
int default_threads(double quota = os::quota());

class ThreadPool {
public:
    using Job = void (*)(void* context, int thread);

    // `threads` counts the caller. Throws std::invalid_argument unless 1 <= threads <= 1024, and ThreadsError where one
    // of them cannot be started: those that were are gone then, for they would have taken the last that others need.
    // `pin` binds worker i to the i-th CPU this process may use (the caller is left alone).
    explicit ThreadPool(int threads, bool pin = false);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }

    // Runs job(context, thread) for thread = 0 .. size() - 1, number 0 on the caller, and returns when all are done.
    // What a thread of the job throws is thrown here once the others are done, the first where there are several; a job
    // in which they wait for each other must see to it that they do not wait for one that threw. The job must not call
    // run. Calls from several threads take turns. Throws ForkedError after a fork.
    void run(Job job, void* context);

    // The same for anything callable as f(thread).
    template <class F>
    void run(F&& f) {
        run([](void* context, int thread) { (*static_cast<std::remove_reference_t<F>*>(context))(thread); }, &f);
    }

    // Inside a job: returns when every thread of the pool has called it. What was written before is seen after.
    void barrier(int thread);

    // How long an idle worker spins before it yields, and after six times as long sleeps. A step's caller keeps its
    // workers awake across the gap between two steps with a longer one.
    void set_spin(int microseconds) { spin_us_.store(microseconds, std::memory_order_relaxed); }
    static constexpr int kSpinMicroseconds = 50;

private:
    struct alignas(64) Slot {
        std::atomic<uint32_t> arrived{0};  // barriers this thread has reached
    };

    void stop();
    void call(int thread);
    void work(int thread);
    uint32_t next_epoch(uint32_t seen);
    bool forked() const;

    const int size_;
    const unsigned generation_;  // of the process, counted in forks
    std::mutex turn_;
    Job job_ = nullptr;
    void* context_ = nullptr;
    std::mutex failure_turn_;
    std::exception_ptr failure_;  // of the job
    bool stop_ = false;
    alignas(64) std::atomic<uint32_t> epoch_{0};     // jobs started
    alignas(64) std::atomic<uint32_t> released_{0};  // barriers passed
    std::atomic<int> spin_us_{kSpinMicroseconds};
    std::vector<Slot> slots_;
    std::unique_ptr<std::vector<std::thread>> workers_;
};

}  // namespace headrace
