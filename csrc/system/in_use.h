// An error where two threads would be in one object at once: steps run without Python's lock.
#pragma once

#include <atomic>
#include <stdexcept>

namespace headrace {

// Who is in an object: several that read it, or one that changes it. A copy begins with nobody.
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

    std::atomic<int> users_{0};  // -1: one that changes the object
};

// Each lasts as long as its scope, and throws std::runtime_error instead of waiting for the other thread.
class Exclusive {
public:
    explicit Exclusive(InUse& of) : users_(of.users_) {
        int nobody = 0;
        if (!users_.compare_exchange_strong(nobody, -1, std::memory_order_acquire)) InUse::refuse();
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
