#include "program/streaming.h"

#include <chrono>
#include <utility>

#include "system/os.h"

namespace headrace {

Streaming::Streaming(std::shared_ptr<Arena> arena, std::vector<Unit> units, std::vector<bool> held, int ahead,
                     bool release)
    : arena_(std::move(arena)),
      units_(std::move(units)),
      held_(std::move(held)),
      ahead_(ahead),
      release_(release),
      process_(os::process_id()),
      states_(units_.size(), State::kAway) {
    std::unique_lock<std::mutex> lock(turn_);
    for (int unit = 1; unit < this->units(); ++unit) {
        if (!streamed(unit)) read(unit, lock);
    }
    lock.unlock();
    entries_ = 1;
    following_ = next(0, this->units() - 1);
    thread_ = std::make_unique<std::thread>([this] { work(); });
}

Streaming::~Streaming() {
    if (process_ != os::process_id()) {
        static_cast<void>(thread_.release());  // a thread of the parent
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(turn_);
        stop_ = true;
    }
    entered_.notify_all();
    thread_->join();
}

void Streaming::enter(int unit, int last) {
    std::unique_lock<std::mutex> lock(turn_);
    stats_.missed += streamed(unit) && unit != following_ && unit != current_;
    states_[0] = unit == 0 ? State::kThere : states_[0];
    current_ = unit;
    following_ = next(unit, last);
    ++entries_;
    entered_.notify_one();
    const State& state = states_[static_cast<size_t>(unit)];
    if (!streamed(unit) || state == State::kThere) return;
    const auto start = std::chrono::steady_clock::now();
    arrived_.wait(lock, [&] { return state == State::kThere; });
    stats_.waited += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Streaming::Stats Streaming::stats() const {
    const std::lock_guard<std::mutex> lock(turn_);
    return stats_;
}

// The unit to read while `unit` computes: the next streamed one of the step, else the first of the next step.
int Streaming::next(int unit, int last) const {
    int candidate = unit;
    for (int left = ahead_, looked = 0; left > 0 && looked < units() * ahead_; ++looked) {
        candidate = candidate >= last || candidate + 1 >= units() ? 1 : candidate + 1;
        left -= streamed(candidate);
    }
    return candidate;
}

void Streaming::read(int unit, std::unique_lock<std::mutex>& lock) {
    const size_t number = static_cast<size_t>(unit);
    states_[number] = State::kComing;
    lock.unlock();
    uint64_t bytes = 0;
    const auto start = std::chrono::steady_clock::now();
    for (const auto& part : units_[number]) {
        arena_->fetch(part);
        bytes += part.size();
    }
    lock.lock();
    stats_.reading += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    stats_.fetched += bytes;
    states_[number] = State::kThere;
    arrived_.notify_all();
}

void Streaming::release(int unit, std::unique_lock<std::mutex>& lock) {
    const size_t number = static_cast<size_t>(unit);
    states_[number] = State::kAway;
    lock.unlock();
    for (const auto& part : units_[number]) arena_->drop(part);
    lock.lock();
}

// Releases all units but the current one and the next, so that there is room, and reads these two.
void Streaming::work() {
    std::unique_lock<std::mutex> lock(turn_);
    for (uint64_t seen = 0;;) {
        entered_.wait(lock, [&] { return stop_ || entries_ != seen; });
        if (stop_) return;
        seen = entries_;
        for (int unit = 0; release_ && unit < units(); ++unit) {
            const bool given = unit == 0 ? !held_[0] : streamed(unit);
            if (given && unit != current_ && unit != following_ && states_[static_cast<size_t>(unit)] == State::kThere)
                release(unit, lock);
        }
        for (const int unit : {current_, following_}) {
            if (entries_ == seen && streamed(unit) && states_[static_cast<size_t>(unit)] == State::kAway)
                read(unit, lock);
        }
    }
}

}  // namespace headrace
