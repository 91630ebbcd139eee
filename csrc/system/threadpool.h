// The threads of the native core: the caller and n - 1 workers that run one job together.
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

// The process was forked: the pool's workers are in the parent only.
struct ForkedError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The system did not start all threads of a pool.
struct ThreadsError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// One thread for each core in the affinity mask, at most the whole CPUs of the quota. A rest of 0.75 CPUs or more
// counts as one: a thread that has less is stopped for most of each period, and the others wait for it. At least 1.
int default_threads(double quota = os::quota());

class ThreadPool {
public:
    using Job = void (*)(void* context, int thread);

    // `threads` counts the caller. Throws std::invalid_argument unless 1 <= threads <= 1024, and ThreadsError if one of
    // them cannot be started. It ends those that were started: the rest of the process may need the last ones.
    // `pin` binds worker i to the i-th CPU this process may use (the caller is left alone).
    explicit ThreadPool(int threads, bool pin = false);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }

    // Who runs a job. kAll: every thread, each once. kAvailable: the caller, and the workers that the system schedules
    // before the caller's part ends; the others miss the job. Such a job must be complete when any one of its threads
    // is.
    enum class Crew { kAll, kAvailable };

    // Runs job(context, thread) for thread = 0 .. size() - 1, number 0 on the caller, and returns when all threads that
    // take part are done. An exception of a thread is thrown here once the others are done, the first if there are
    // several; a job in which threads wait for each other must not wait for one that threw. The job must not call run.
    // Calls from several threads take turns. Throws ForkedError after a fork.
    void run(Job job, void* context, Crew crew = Crew::kAll);

    // The same for anything callable as f(thread).
    template <class F>
    void run(F&& f, Crew crew = Crew::kAll) {
        void* context = const_cast<void*>(static_cast<const void*>(&f));
        run([](void* held, int thread) { (*static_cast<std::remove_reference_t<F>*>(held))(thread); }, context, crew);
    }

    // Inside a job of kAll: returns when every thread of the pool has called it. Writes before it are visible after it.
    void barrier(int thread);

    // Time for which an idle worker spins; then it yields, and after six times this time it sleeps. A long time keeps
    // workers awake across the gap between two steps.
    void set_spin(int microseconds) { spin_us_.store(microseconds, std::memory_order_relaxed); }
    static constexpr int kSpinMicroseconds = 50;

private:
    struct alignas(64) Slot {
        std::atomic<uint32_t> arrived{0};  // barriers this thread has reached
    };

    void stop();
    void call(int thread);
    void work(int thread);
    bool join(uint32_t& joined);
    uint32_t next_epoch(uint32_t seen);
    bool forked() const;

    const int size_;
    const unsigned generation_;  // of the process, counted in forks
    std::mutex turn_;
    Job job_ = nullptr;
    void* context_ = nullptr;
    Crew crew_ = Crew::kAll;
    std::mutex failure_turn_;
    std::exception_ptr failure_;  // of the job
    bool stop_ = false;
    alignas(64) std::atomic<uint32_t> epoch_{0};  // jobs started
    // The job that can be joined: its number in the high half, kOpen, and how many workers joined it. 0: none.
    static constexpr uint64_t kOpen = 1 << 16;
    alignas(64) std::atomic<uint64_t> gate_{0};
    alignas(64) std::atomic<uint32_t> finished_{0};  // workers that joined the job and are done
    alignas(64) std::atomic<uint32_t> released_{0};  // barriers passed
    std::atomic<int> spin_us_{kSpinMicroseconds};
    std::vector<Slot> slots_;
    std::unique_ptr<std::vector<std::thread>> workers_;
};

}  // namespace headrace
