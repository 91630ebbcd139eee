#include "ranks/ranks.h"

#include <algorithm>
#include <new>
#include <thread>

#include "ranks/sums.h"
#include "system/os.h"
#include "system/pause.h"

namespace headrace {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kMagic = 0x31736b6e61722d68;  // changes with the format of the region
constexpr int kPolls = 2000;                     // 20 to 100 microseconds, then a waiting thread yields
constexpr auto kAwake = 1ms;                     // then it sleeps
constexpr auto kSleep = 20ms;                    // then it looks for ended processes
constexpr auto kLongestGap = 5 * kSleep;
constexpr size_t kLine = 128;
constexpr int kUnknown = -3;  // a process that was not opened yet

size_t lines(int64_t bytes) { return (static_cast<size_t>(bytes) + kLine - 1) / kLine * kLine; }

bool reached(const std::atomic<uint32_t>& value, uint32_t target) {
    return static_cast<int32_t>(value.load(std::memory_order_acquire) - target) >= 0;  // the counters wrap
}

}  // namespace

Region::Region(const Sizes& sizes) : sizes_(sizes) {
    if (sizes.world < 1 || sizes.world > kMostRanks || kMostRanks % sizes.world != 0)
        throw std::invalid_argument("a model is cut for 1, 2, 4 or 8 ranks, not " + std::to_string(sizes.world));
    if (sizes.slot_bytes < 0 || sizes.common_bytes < 0 || sizes.message_bytes < 0)
        throw std::invalid_argument("the sizes of a region are 0 or more bytes");
    descriptor_ = os::make_shared(bytes());
    try {
        header_ = static_cast<Header*>(os::map_shared(descriptor_, mapped_));
    } catch (...) {
        os::close(descriptor_);
        throw;
    }
    new (header_) Header{};
    header_->sizes = sizes;
    header_->magic = kMagic;
}

Region::Region(int descriptor) {
    void* memory = os::map_shared(descriptor, mapped_);
    header_ = static_cast<Header*>(memory);
    const bool known = mapped_ >= sizeof(Header) && header_->magic == kMagic;
    if (known) sizes_ = header_->sizes;
    if (!known || sizes_.world < 1 || sizes_.world > kMostRanks || sizes_.slot_bytes < 0 || sizes_.common_bytes < 0 ||
        sizes_.message_bytes < 0 || bytes() != mapped_) {
        os::release(memory, mapped_);
        throw std::runtime_error("the shared memory is no region of ranks, or of another version");
    }
}

Region::~Region() {
    os::release(header_, mapped_);
    if (descriptor_ >= 0) os::close(descriptor_);
}

size_t Region::bytes() const {
    return lines(sizeof(Header)) + 2 * static_cast<size_t>(sizes_.world) * lines(sizes_.slot_bytes) +
           2 * lines(sizes_.message_bytes) + lines(sizes_.common_bytes);
}

uint8_t* Region::slot(int rank, uint32_t exchange) const {
    const size_t number = 2 * static_cast<size_t>(rank) + exchange % 2;
    return reinterpret_cast<uint8_t*>(header_) + lines(sizeof(Header)) + number * lines(sizes_.slot_bytes);
}

uint8_t* Region::message(uint32_t command) const {
    return slot(sizes_.world, 0) + command % 2 * lines(sizes_.message_bytes);
}

uint8_t* Region::common() const { return slot(sizes_.world, 0) + 2 * lines(sizes_.message_bytes); }

Ranks::Ranks(std::shared_ptr<Region> region, int rank, std::chrono::milliseconds timeout)
    : region_(std::move(region)), rank_(rank), timeout_(timeout) {
    if (rank < 0 || rank >= world())
        throw std::invalid_argument("there are ranks 0 to " + std::to_string(world() - 1) + ", not " +
                                    std::to_string(rank));
    int32_t nobody = 0;
    if (!region_->header_->ranks[rank].process.compare_exchange_strong(nobody, os::process_id()))
        throw std::invalid_argument("process " + std::to_string(nobody) + " is rank " + std::to_string(rank) +
                                    " already");
    std::fill(std::begin(processes_), std::end(processes_), kUnknown);
}

Ranks::~Ranks() {
    if (rank_ == 0) end();
    for (const int process : processes_) {
        if (process >= 0) os::close(process);
    }
}

void Ranks::advance(Region::Counter& counter, uint32_t value) {
    counter.value.store(value, std::memory_order_seq_cst);
    if (counter.sleepers.load(std::memory_order_seq_cst) > 0) os::wake_all(counter.value);
}

void Ranks::arrive(uint32_t exchange) {
    Region::Counter& mine = region_->header_->ranks[rank_].arrived;
    if (mine.value.load(std::memory_order_relaxed) != exchange + 1) advance(mine, exchange + 1);
}

bool Ranks::await(uint32_t exchange) {
    for (int other = 0; other < world(); ++other) {
        if (other == rank_) continue;
        if (!wait(region_->header_->ranks[other].arrived, exchange + 1, other, false)) return false;
    }
    return !lost();
}

// Waits for a counter of rank `other`. `idle`: as long as it takes.
bool Ranks::wait(Region::Counter& counter, uint32_t target, int other, bool idle) {
    for (int poll = 0; poll < kPolls; ++poll) {
        if (reached(counter.value, target)) return true;
        pause_thread();
    }
    auto last = Clock::now();
    Clock::duration waited{};
    while (!reached(counter.value, target)) {
        if (lost()) return false;
        const auto now = Clock::now();
        // A longer gap: this process was stopped, perhaps together with the others.
        waited += std::min<Clock::duration>(now - last, kLongestGap);
        last = now;
        if (waited < kAwake) {
            std::this_thread::yield();
            continue;
        }
        counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = counter.value.load(std::memory_order_seq_cst);
        if (static_cast<int32_t>(seen - target) < 0) os::sleep_on(counter.value, seen, kSleep);
        counter.sleepers.fetch_sub(1, std::memory_order_relaxed);
        if (reached(counter.value, target)) break;
        if (find_ended()) return false;
        if (!idle && waited > timeout_) {
            lose(other, Loss::kSilent);
            return false;
        }
    }
    return true;
}

// Whether the process of another rank has ended.
bool Ranks::find_ended() {
    const std::lock_guard turn(processes_turn_);
    for (int other = 0; other < world(); ++other) {
        const int process = region_->header_->ranks[other].process.load(std::memory_order_acquire);
        if (process == 0 || process == os::process_id()) continue;
        int& descriptor = processes_[other];
        if (descriptor == kUnknown) descriptor = os::open_process(process);
        if (descriptor == -1 || (descriptor >= 0 && os::ended(descriptor))) {
            lose(other, Loss::kEnded);
            return true;
        }
    }
    return false;
}

void Ranks::add_all(std::span<const float> x, float* out) {
    if (x.size_bytes() > static_cast<size_t>(sizes().slot_bytes))
        throw std::invalid_argument("a slot of the region has " + std::to_string(sizes().slot_bytes) + " bytes, not " +
                                    std::to_string(x.size_bytes()));
    std::copy(x.begin(), x.end(), reinterpret_cast<float*>(mine(exchange_)));
    arrive(exchange_);
    if (!await(exchange_)) check();
    const float* parts[kMostRanks];
    for (int rank = 0; rank < world(); ++rank) parts[rank] = reinterpret_cast<const float*>(of(rank, exchange_));
    add_parts(parts, world(), static_cast<int>(x.size()), [&](int i, float sum) { out[i] = sum; });
    ++exchange_;
}

std::span<uint8_t> Ranks::next_message() {
    check();
    for (int other = 1; other < world(); ++other) {
        // The message before the last one used the same memory.
        if (!wait(region_->header_->ranks[other].finished, command_ - 1, other, false)) check();
    }
    return {region_->message(command_), static_cast<size_t>(sizes().message_bytes)};
}

void Ranks::send(size_t bytes) {
    region_->header_->message_sizes[command_ % 2] = bytes;
    advance(region_->header_->sent, ++command_);
}

std::span<const uint8_t> Ranks::receive() {
    if (!wait(region_->header_->sent, command_ + 1, 0, true)) check();
    check();
    return {region_->message(command_), region_->header_->message_sizes[command_ % 2]};
}

void Ranks::finish() { advance(region_->header_->ranks[rank_].finished, ++command_); }

void Ranks::end() noexcept {
    if (ended_ || rank_ != 0) return;
    ended_ = true;
    try {
        next_message();
        send(0);
    } catch (const std::exception&) {  // a lost rank has ended the others
    }
}

void Ranks::lose(int rank, Loss loss) noexcept {
    uint32_t none = 0;
    region_->header_->lost.compare_exchange_strong(none, static_cast<uint32_t>(loss) << 8 | static_cast<uint32_t>(rank),
                                                   std::memory_order_acq_rel);
}

void Ranks::give_up() noexcept { lose(rank_, Loss::kFailed); }

std::string Ranks::reason() const {
    const uint32_t lost = region_->header_->lost.load(std::memory_order_acquire);
    if (lost == 0) return "";
    const std::string rank = "rank " + std::to_string(lost & 0xff) + " of " + std::to_string(world());
    switch (static_cast<Loss>(lost >> 8)) {
        case Loss::kEnded:
            return rank + " has ended";
        case Loss::kSilent:
            return rank + " has not answered for " + std::to_string(timeout_.count() / 1000) + " s";
        default:
            return rank + " has failed";
    }
}

void Ranks::check() const {
    if (lost()) throw RankLost(reason());
}

}  // namespace headrace
