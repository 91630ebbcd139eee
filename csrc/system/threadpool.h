// Thread pool of the core: the caller and n - 1 workers run one job together.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "system/os.h"

namespace headrace {

// The process was forked: the pool's workers exist only in the parent.
struct ForkedError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The system refused to start all threads of a pool.
struct ThreadsError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// One thread for each core in the affinity mask, but not more than the quota in CPUs, and at least 1. A fraction of
// 0.75 CPUs or more counts as a CPU; with less, a thread would be stopped for most of each period and delay the others.
int default_threads(double quota = os::quota());

class ThreadPool {
public:
    using Job = void (*)(void* context, int thread);

    // `threads` includes the caller. `pin` binds worker i to the i-th CPU that this process may use; the caller is not
    // pinned. Throws std::invalid_argument unless 1 <= threads <= 1024. Throws ThreadsError if a thread cannot be
    // started, and ends the started ones, so that the rest of the process can use them.
    explicit ThreadPool(int threads, bool pin = false);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }

    // Threads that run a job. kAll: every thread, once. kAvailable: the caller, and the workers that the system
    // schedules before the caller's part ends; the others miss the job. When one thread of such a job returns, all work
    // of the job must have been taken.
    enum class Crew { kAll, kAvailable };

    // Runs job(context, thread) for thread = 0 .. size() - 1, thread 0 on the caller, and returns when all threads of
    // the job are done. Rethrows the first exception of a thread after the others are done. If threads of a job wait
    // for each other, they must not wait for a thread that threw. The job must not call run. Concurrent calls run one
    // after the other. Throws ForkedError after a fork.
    void run(Job job, void* context, Crew crew = Crew::kAll);

    // The same for a callable f(thread).
    template <class F>
    void run(F&& f, Crew crew = Crew::kAll) {
        void* context = const_cast<void*>(static_cast<const void*>(&f));
        run([](void* held, int thread) { (*static_cast<std::remove_reference_t<F>*>(held))(thread); }, context, crew);
    }

    // Only in a job of kAll: returns when every thread of the pool has called it. Writes before it are visible after
    // it.
    void barrier(int thread);

    // Time for which an idle worker spins. Then it yields, and after six times this time it sleeps. A long time keeps
    // the workers awake between two steps.
    void set_spin(int microseconds) { spin_us_.store(microseconds, std::memory_order_relaxed); }
    static constexpr int kSpinMicroseconds = 50;

private:
    struct alignas(64) Slot {
        std::atomic<uint32_t> arrived{0};  // number of barriers that this thread has reached
    };

    void stop();
    void call(int thread);
    void work(int thread);
    bool join(uint32_t& joined);
    uint32_t next_epoch(uint32_t seen);
    bool forked() const;

    const int size_;
    const unsigned generation_;  // number of forks when the pool was created
    std::mutex turn_;
    Job job_ = nullptr;
    void* context_ = nullptr;
    Crew crew_ = Crew::kAll;
    std::mutex failure_turn_;
    std::exception_ptr failure_;  // first exception of the job
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<uint32_t> epoch_{0};  // number of jobs started
    // The job that workers can join: its number in the high half, kOpen, and the number of workers that joined. 0:
    // none.
    static constexpr uint64_t kOpen = 1 << 16;
    alignas(64) std::atomic<uint64_t> gate_{0};
    alignas(64) std::atomic<uint32_t> finished_{0};  // workers that have finished the job
    alignas(64) std::atomic<uint32_t> released_{0};  // number of barriers passed
    std::atomic<int> spin_us_{kSpinMicroseconds};
    std::vector<Slot> slots_;
    std::unique_ptr<std::vector<std::thread>> workers_;
};

}  // namespace headrace
