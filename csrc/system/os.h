// The operating system: all that the core asks of it. One source per system (os_linux.cpp); no other file includes a
// header of the system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace headrace::os {

// CPU numbers of this process's affinity mask, ascending. `ask` fills a mask of so many bytes, or fails with EINVAL if
// that is fewer than the system has CPUs; another one is for tests.
using AskAffinity = int (*)(size_t bytes, void* mask);
int ask_affinity(size_t bytes, void* mask);
std::vector<int> allowed_cpus(AskAffinity ask = ask_affinity);

// How many cores those are: two hyperthreads are one.
int cores(const std::vector<int>& cpus);

// CPUs' worth of time the control group grants (cgroup v2 cpu.max, v1 cfs quota), up the whole path; 0: no limit.
// The arguments are for tests.
inline constexpr const char* kMembership = "/proc/self/cgroup";
inline constexpr const char* kControlGroups = "/sys/fs/cgroup";
double quota(const std::string& membership = kMembership, const std::string& root = kControlGroups);

void pin(std::thread& thread, int cpu);

// CPU time of the calling thread.
double thread_seconds();

// Calls `f`, once more for each call of this function, in every child that the process forks.
void on_fork(void (*f)());

// Address space whose pages come when they are written. Throws std::bad_alloc.
void* reserve(size_t bytes);
void release(void* memory, size_t bytes);

enum class Pages { kLarge, kSmall };
// A hint for pages that are not there yet.
void prefer(Pages pages, void* memory, size_t bytes);

// Lets all pages come now; false where the system cannot.
bool provide(void* memory, size_t bytes);

// Gives back the pages of a mapped file that hold these bytes. A later read fetches them from the file again, also a
// read of neighbours on the first and the last page.
void forget(const void* mapped, size_t bytes);

// The start of the page that holds an address. Pages have 4, 16 or 64 KB on Arm.
constexpr uintptr_t page_start(uintptr_t address, uintptr_t page_bytes) { return address / page_bytes * page_bytes; }

// What the CPU has, where only the system can say: the words of AT_HWCAP and AT_HWCAP2 on Arm, else 0.
struct Features {
    unsigned long first, second;
};
Features features();

}  // namespace headrace::os
