// Detects concurrent use of an object. Steps run without the GIL, so two Python threads could use one object at once.
#pragma once

#include <atomic>
#include <stdexcept>

namespace headrace {

// Users of an object: several readers or one writer. A copy starts without users.
class InUse {
public:
    InUse() = default;
    InUse(const InUse&) noexcept {}
    InUse& operator=(const InUse&) noexcept { return *this; }

private:
    friend class Exclusive;
    friend class Shared;

    [[noreturn]] static void refuse() {
        throw std::runtime_error("this model is in a step of another thread; let one thread use it at a time");
    }

    std::atomic<int> users_{0};  // number of readers; -1: one writer
};

// Scoped locks for a writer (Exclusive) and a reader (Shared). They throw std::runtime_error instead of waiting.
class Exclusive {
public:
    explicit Exclusive(InUse& of) : users_(of.users_) {
        int free = 0;
        if (!users_.compare_exchange_strong(free, -1, std::memory_order_acquire)) InUse::refuse();
    }
    ~Exclusive() { users_.store(0, std::memory_order_release); }
    Exclusive(const Exclusive&) = delete;

private:
    std::atomic<int>& users_;
};

class Shared {
public:
    explicit Shared(InUse& of) : users_(&of.users_) {
        int users = users_->load(std::memory_order_relaxed);
        do {
            if (users < 0) InUse::refuse();
        } while (!users_->compare_exchange_weak(users, users + 1, std::memory_order_acquire));
    }
    ~Shared() {
        if (users_) users_->fetch_sub(1, std::memory_order_release);
    }
    Shared(Shared&& other) noexcept : users_(other.users_) { other.users_ = nullptr; }

private:
    std::atomic<int>* users_;
};

}  // namespace headrace
