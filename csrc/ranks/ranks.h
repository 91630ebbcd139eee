// Ranks: processes (in tests: threads) that run one model together, each with a share of its weights and of K and V.
//
// They share a region of memory. In it, rank 0 sends commands to the others, and all ranks exchange rows. Exchanges
// have numbers; every rank passes the same ones in the same order. In exchange e a rank writes its part (`mine`),
// arrives, waits for the others and reads their parts (`of`). A rank has two slots, used in turn: it writes the part of
// e + 2 only after it waited in e + 1, when all others have read e.
//
// A lost rank ends all of them: the region keeps the reason, every wait returns, and the ranks throw RankLost.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace headrace {

constexpr int kMostRanks = 8;

// A rank has ended, or has not answered in time.
struct RankLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The shared memory of the ranks of one model. Its size is fixed.
class Region {
public:
    struct Sizes {
        int32_t world;
        int64_t slot_bytes;     // largest part of a rank in an exchange
        int64_t common_bytes;   // memory that all ranks write, see Ranks::common
        int64_t message_bytes;  // largest message of a command
    };

    // A new region. Throws std::invalid_argument unless the world is 1, 2, 4 or 8, std::runtime_error without memory.
    explicit Region(const Sizes& sizes);
    // Maps the region of another process; the descriptor stays open. Throws std::runtime_error if it is none.
    explicit Region(int descriptor);
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    int descriptor() const { return descriptor_; }  // -1 for a region of another process
    int world() const { return sizes_.world; }
    const Sizes& sizes() const { return sizes_; }

private:
    friend class Ranks;

    // A counter that others wait for.
    struct Counter {
        alignas(64) std::atomic<uint32_t> value{0};
        std::atomic<uint32_t> sleepers{0};
    };
    struct Rank {
        Counter arrived;   // number of exchanges
        Counter finished;  // number of commands
        alignas(64) std::atomic<int32_t> process{0};
    };
    struct Header {
        uint64_t magic;
        Sizes sizes;
        alignas(64) std::atomic<uint32_t> lost{0};  // 0, or the reason
        Counter sent;                               // number of commands
        uint64_t message_sizes[2];
        Rank ranks[kMostRanks];
    };

    size_t bytes() const;
    uint8_t* slot(int rank, uint32_t exchange) const;
    uint8_t* message(uint32_t command) const;
    uint8_t* common() const;

    int descriptor_ = -1;
    Sizes sizes_{};
    size_t mapped_ = 0;
    Header* header_ = nullptr;
};

// One rank. Its threads may arrive and wait at once; all else is for one thread.
class Ranks {
public:
    using Clock = std::chrono::steady_clock;

    // `timeout`: a rank that lets another wait longer is lost. Throws std::invalid_argument if there is no such rank,
    // or another process has it.
    Ranks(std::shared_ptr<Region> region, int rank, std::chrono::milliseconds timeout);
    ~Ranks();
    Ranks(const Ranks&) = delete;
    Ranks& operator=(const Ranks&) = delete;

    int rank() const { return rank_; }
    int world() const { return region_->world(); }
    const Region::Sizes& sizes() const { return region_->sizes(); }

    // Number of the next exchange. Between two steps, `passed` sets it.
    uint32_t exchange() const { return exchange_; }
    void passed(uint32_t exchange) { exchange_ = exchange; }
    uint8_t* mine(uint32_t exchange) const { return region_->slot(rank_, exchange); }
    const uint8_t* of(int rank, uint32_t exchange) const { return region_->slot(rank, exchange); }
    // Any number of the rank's threads may arrive; all its writes must be visible to the first of them.
    void arrive(uint32_t exchange);
    // Returns whether all ranks have arrived; false once a rank is lost.
    bool await(uint32_t exchange);

    // One exchange outside a step: out [width] = the sum of every rank's x, joined as a tree. Throws
    // std::invalid_argument if x does not fit a slot, RankLost.
    void add_all(std::span<const float> x, float* out);

    // Memory of Sizes::common_bytes that all ranks may write.
    uint8_t* common() const { return region_->common(); }

    // Commands. The leader, rank 0, writes a message to `next_message` and sends it. The others receive each message
    // and finish it; an empty one is the end. All throw RankLost.
    std::span<uint8_t> next_message();
    void send(size_t bytes);
    std::span<const uint8_t> receive();
    void finish();
    // Sends the end, unless a rank is lost.
    void end() noexcept;

    // Records that this rank cannot go on, unless one is lost already.
    void give_up() noexcept;
    bool lost() const { return region_->header_->lost.load(std::memory_order_acquire) != 0; }
    // Why a rank is lost, one line; empty if none is.
    std::string reason() const;
    // Throws RankLost if a rank is lost.
    void check() const;

private:
    enum class Loss : uint32_t { kEnded = 1, kSilent = 2, kFailed = 3 };

    bool wait(Region::Counter& counter, uint32_t target, int other, bool idle);
    void lose(int rank, Loss loss) noexcept;
    bool find_ended();
    static void advance(Region::Counter& counter, uint32_t value);

    const std::shared_ptr<Region> region_;
    const int rank_;
    const std::chrono::milliseconds timeout_;
    uint32_t exchange_ = 0;
    uint32_t command_ = 0;  // number of the next command
    bool ended_ = false;
    std::mutex processes_turn_;
    int processes_[kMostRanks];  // descriptors of the other processes, see os::open_process
};

}  // namespace headrace
