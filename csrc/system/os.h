// Functions of the operating system that the core uses. One source per system (os_linux.cpp); no other file includes a
// system header.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace headrace::os {

// CPU numbers in this process's affinity mask, ascending. `ask` fills a mask of `bytes` bytes, or fails with EINVAL if
// the mask is too small for the system's CPUs. Tests pass another `ask`.
using AskAffinity = int (*)(size_t bytes, void* mask);
int ask_affinity(size_t bytes, void* mask);
std::vector<int> allowed_cpus(AskAffinity ask = ask_affinity);

// Number of cores of these CPUs; two hyperthreads are one core.
int cores(const std::vector<int>& cpus);

// CPU quota of the control group in CPUs (cgroup v2 cpu.max, v1 cfs quota): the smallest on the path to the root; 0: no
// limit. Tests pass other arguments.
inline constexpr const char* kMembership = "/proc/self/cgroup";
inline constexpr const char* kControlGroups = "/sys/fs/cgroup";
double quota(const std::string& membership = kMembership, const std::string& root = kControlGroups);

void pin(std::thread& thread, int cpu);

// CPU time of the calling thread in seconds.
double thread_seconds();

// Registers `f` to be called in every child that the process forks.
void on_fork(void (*f)());

// Reserves address space; the system provides its pages when they are first written. Throws std::bad_alloc.
void* reserve(size_t bytes);
void release(void* memory, size_t bytes);

enum class Pages { kLarge, kSmall };
// Hint for the page size of pages that the system has not provided yet.
void prefer(Pages pages, void* memory, size_t bytes);

// Makes the system provide all pages now. Returns false if it does not support this.
bool provide(void* memory, size_t bytes);

// Releases the pages of a mapped file that contain these bytes. A later read of these pages, also of other bytes on the
// first and last page, loads them from the file again.
void forget(const void* mapped, size_t bytes);

// A file whose pages are memory. `extend_file` takes disk space for `bytes` more bytes; `map_file` maps them, readable
// and writable, and `map_file_read_only` maps bytes that the file has. All throw std::runtime_error with the system's
// message.
int duplicate(int file);
void extend_file(int file, size_t begin, size_t bytes);
void* map_file(int file, size_t begin, size_t bytes);
void* map_file_read_only(int file, size_t begin, size_t bytes);
void write_back(int file);
// Reads the pages of a mapped file that contain these bytes, and maps them. `begin`: place of the bytes in the file.
void fetch(int file, size_t begin, const void* mapped, size_t bytes);
// Releases whole pages of a mapped file: those between the first and the last page border in these bytes. They are
// removed from the system's cache, too, if they have been written back.
void drop(int file, size_t begin, const void* mapped, size_t bytes);
// Bytes of the pages of a mapped file that are in memory.
size_t resident(const void* mapped, size_t bytes);

// Start of the page that contains the address. On Arm, pages have 4, 16 or 64 KB.
constexpr uintptr_t page_start(uintptr_t address, uintptr_t page_bytes) { return address / page_bytes * page_bytes; }

// Memory that several processes map. `make_shared` returns a file descriptor of `bytes` zero bytes whose size cannot
// change; pages are provided when they are first written. `map_shared` sets `bytes` to the size. Both throw
// std::runtime_error with the system's message.
int make_shared(size_t bytes);
void* map_shared(int descriptor, size_t& bytes);
void close(int descriptor);

// Sleeps until `word` is woken, differs from `seen`, or the time is over; may return earlier. The word may be in shared
// memory.
void sleep_on(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::milliseconds most);
void wake_all(const std::atomic<uint32_t>& word);

int process_id();
// Descriptor of a process; -1 if there is no such process, -2 if the system has no such descriptors.
int open_process(int process);
// Whether the process has ended, even if its parent has not waited for it.
bool ended(int descriptor);

// CPU features that only the system reports: AT_HWCAP and AT_HWCAP2 on Arm, otherwise 0.
struct Features {
    unsigned long first, second;
};
Features features();

// Asks the system to let this process use the tiles of AMX (Linux 5.16). Returns false if it refuses.
bool allow_tiles();

}  // namespace headrace::os
