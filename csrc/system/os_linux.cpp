// Implementation for Linux.
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <set>
#include <sstream>
#include <stdexcept>

#include "system/nodes.h"
#include "system/os.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // Linux 5.3
#endif

namespace headrace::os {
namespace {

constexpr size_t kPiece = size_t{1} << 20;  // bytes of one read
constexpr size_t kMostMasks = 1 << 10;      // masks of 1024 CPUs each

std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

double smaller(double limit, double other) { return limit > 0 && (other <= 0 || limit < other) ? limit : other; }

// "max 100000" or "150000 100000": microseconds of CPU time per period.
double cpu_max(const std::string& folder) {
    std::istringstream words(first_line(folder + "/cpu.max"));
    double quota = 0, period = 0;
    return words >> quota >> period && quota > 0 && period > 0 ? quota / period : 0;
}

double cfs_quota(const std::string& folder) {
    const std::string quota = first_line(folder + "/cpu.cfs_quota_us"),
                      period = first_line(folder + "/cpu.cfs_period_us");
    const double q = std::atof(quota.c_str()), p = std::atof(period.c_str());
    return q > 0 && p > 0 ? q / p : 0;
}

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what + ": " + std::strerror(errno)); }

uintptr_t page_bytes() {
    static const auto bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

// Smallest limit of a control group and all groups above it.
double limit_on_path(const std::string& root, std::string path, double (*limit)(const std::string&)) {
    double least = 0;
    for (;;) {
        least = smaller(limit(root + path), least);
        const size_t slash = path.rfind('/');
        if (slash == std::string::npos || path.empty()) return least;
        path.resize(slash);
    }
}

}  // namespace

int ask_affinity(size_t bytes, void* mask) { return sched_getaffinity(0, bytes, static_cast<cpu_set_t*>(mask)); }

std::vector<int> allowed_cpus(AskAffinity ask) {
    std::vector<int> cpus;
    std::vector<cpu_set_t> mask(1);  // 1024 CPUs per element
    while (ask(mask.size() * sizeof(cpu_set_t), mask.data()) != 0) {
        if (errno != EINVAL || mask.size() > kMostMasks) return cpus;
        mask.assign(2 * mask.size(), {});
    }
    const size_t bytes = mask.size() * sizeof(cpu_set_t);
    for (size_t cpu = 0; cpu < 8 * bytes; ++cpu) {
        if (CPU_ISSET_S(cpu, bytes, mask.data())) cpus.push_back(static_cast<int>(cpu));
    }
    return cpus;
}

int cores(const std::vector<int>& cpus) {
    std::set<std::string> found;
    for (const int cpu : cpus) {
        const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
        const std::string siblings = first_line(folder + "thread_siblings_list");
        found.insert(siblings.empty() ? std::to_string(cpu) : siblings);
    }
    return static_cast<int>(found.size());
}

double quota(const std::string& membership, const std::string& root) {
    std::ifstream file(membership);
    double least = 0;
    for (std::string line; std::getline(file, line);) {  // hierarchy:controllers:path
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        std::string controllers = ",";
        controllers.append(line, first + 1, second - first - 1).append(",");
        std::string path = line.substr(second + 1);
        if (path == "/") path.clear();
        if (controllers == ",,") {
            least = smaller(limit_on_path(root, path, cpu_max), least);
        } else if (controllers.find(",cpu,") != std::string::npos) {
            least = smaller(limit_on_path(root + "/cpu", path, cfs_quota), least);
        }
    }
    return least;
}

void pin(std::thread& thread, int cpu) { pin(thread, std::vector<int>{cpu}); }

void pin(std::thread& thread, const std::vector<int>& cpus) {
    const int highest = *std::max_element(cpus.begin(), cpus.end());
    std::vector<cpu_set_t> mask(static_cast<size_t>(highest) / CPU_SETSIZE + 1);
    const size_t bytes = mask.size() * sizeof(cpu_set_t);
    for (const int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), bytes, mask.data());
    pthread_setaffinity_np(thread.native_handle(), bytes, mask.data());
}

namespace {

constexpr int kMostNodes = 8;  // pretended ones
constexpr uintptr_t kNodePage = uintptr_t{2} << 20;
constexpr int kPreferred = 1, kInterleaved = 3;  // linux/mempolicy.h: MPOL_PREFERRED, MPOL_INTERLEAVE

// Reads Linux's list of CPUs, such as "0-3,8".
std::vector<int> cpu_list(const std::string& text) {
    std::vector<int> cpus;
    std::istringstream parts(text);
    for (std::string part; std::getline(parts, part, ',');) {
        int first = 0, last = 0;
        const int count = std::sscanf(part.c_str(), "%d-%d", &first, &last);
        for (int cpu = first; count > 0 && cpu <= (count > 1 ? last : first); ++cpu) cpus.push_back(cpu);
    }
    return cpus;
}

std::vector<Node> pretend(const std::vector<int>& allowed, int count) {
    std::vector<Node> nodes;
    for (int node = 0; node < count; ++node) {
        const auto first = static_cast<size_t>(first_of_node(static_cast<int64_t>(allowed.size()), node, count));
        const auto last = static_cast<size_t>(first_of_node(static_cast<int64_t>(allowed.size()), node + 1, count));
        Node each{-1, {allowed.begin() + static_cast<long>(first), allowed.begin() + static_cast<long>(last)}};
        if (each.cpus.empty()) each.cpus = allowed;  // more nodes than CPUs
        nodes.push_back(each);
    }
    return nodes;
}

void set_policy(int policy, const std::vector<Node>& nodes, void* memory, size_t bytes) {
    const auto start = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t first = page_start(start + kNodePage - 1, kNodePage), last = page_start(start + bytes, kNodePage);
    unsigned long mask = 0;
    for (const Node& node : nodes) {
        if (node.number < 0 || node.number >= 64) return;
        mask |= 1UL << node.number;
    }
    // A hint: if the system refuses, the pages lie on the node of the thread that writes them first.
    if (first < last) syscall(SYS_mbind, first, last - first, policy, &mask, 65UL, 0U);
}

}  // namespace

std::vector<Node> find_nodes(const std::vector<int>& allowed, int pretended, const std::string& root) {
    if (pretended > 1) return pretend(allowed, std::min(pretended, kMostNodes));
    std::vector<Node> found;
    for (int number = 0; number < 64; ++number) {
        Node node{number, {}};
        for (const int cpu : cpu_list(first_line(root + "/node" + std::to_string(number) + "/cpulist"))) {
            if (std::find(allowed.begin(), allowed.end(), cpu) != allowed.end()) node.cpus.push_back(cpu);
        }
        if (!node.cpus.empty()) found.push_back(node);
    }
    if (found.empty()) found.push_back({-1, allowed});
    return found;
}

std::vector<Node> current_nodes() {
    const char* pretended = std::getenv("HEADRACE_NODES");
    return find_nodes(allowed_cpus(), pretended ? std::atoi(pretended) : 0);
}

const std::vector<Node>& nodes() {
    static const std::vector<Node> found = current_nodes();
    return found;
}

void place_on(const Node& node, void* memory, size_t bytes) { set_policy(kPreferred, {node}, memory, bytes); }

void interleave(const std::vector<Node>& nodes, void* memory, size_t bytes) {
    if (nodes.size() > 1) set_policy(kInterleaved, nodes, memory, bytes);
}

double thread_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void on_fork(void (*f)()) { pthread_atfork(nullptr, nullptr, f); }

void* reserve(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return memory;
}

void release(void* memory, size_t bytes) { munmap(memory, bytes); }

void prefer(Pages pages, void* memory, size_t bytes) {
    madvise(memory, bytes, pages == Pages::kLarge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

bool provide(void* memory, size_t bytes) { return madvise(memory, bytes, MADV_POPULATE_WRITE) == 0; }

void forget(const void* mapped, size_t bytes) {
    const auto start = reinterpret_cast<uintptr_t>(mapped);
    const uintptr_t first = page_start(start, page_bytes());
    madvise(reinterpret_cast<void*>(first), start + bytes - first, MADV_DONTNEED);
}

int duplicate(int file) {
    const int copy = fcntl(file, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) fail("a file cannot be used twice");
    return copy;
}

void extend_file(int file, size_t begin, size_t bytes) {
    if (const int problem = posix_fallocate(file, static_cast<off_t>(begin), static_cast<off_t>(bytes)); problem != 0) {
        errno = problem;
        fail("no disk space of " + std::to_string(bytes) + " bytes");
    }
}

void* map_file(int file, size_t begin, size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(begin));
    if (memory == MAP_FAILED) fail("the file of the weights cannot be mapped");
    // Without readahead: `drop` would not release pages beyond a part.
    madvise(memory, bytes, MADV_RANDOM);
    posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);
    return memory;
}

void* map_file_read_only(int file, size_t begin, size_t bytes) {
    struct stat state;
    if (fstat(file, &state) != 0) fail("the file of the weights cannot be read");
    if (static_cast<size_t>(state.st_size) < begin + bytes)
        throw std::runtime_error("the file of the weights has " + std::to_string(state.st_size) + " bytes, not " +
                                 std::to_string(begin + bytes));
    void* memory = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, static_cast<off_t>(begin));
    if (memory == MAP_FAILED) fail("the file of the weights cannot be mapped");
    return memory;
}

void write_back(int file) {
    if (fdatasync(file) != 0) fail("the weights cannot be written");
}

void fetch(int file, size_t begin, const void* mapped, size_t bytes) {
    const auto start = reinterpret_cast<uintptr_t>(mapped);
    const uintptr_t first = page_start(start, page_bytes());
    const size_t size = start + bytes - first, from = begin - (start - first);
    // Hints first, so that the disk has all reads at once. The system may ignore them, so each piece is read, too.
    for (size_t at = 0; at < size; at += kPiece)
        posix_fadvise(file, static_cast<off_t>(from + at), static_cast<off_t>(std::min(kPiece, size - at)),
                      POSIX_FADV_WILLNEED);
    const auto scratch = std::make_unique<char[]>(kPiece);
    for (size_t at = 0; at < size; at += kPiece) {
        if (pread(file, scratch.get(), std::min(kPiece, size - at), static_cast<off_t>(from + at)) < 0) break;
    }
    madvise(reinterpret_cast<void*>(first), size, MADV_POPULATE_READ);
}

void drop(int file, size_t begin, const void* mapped, size_t bytes) {
    const auto start = reinterpret_cast<uintptr_t>(mapped);
    const uintptr_t first = page_start(start + page_bytes() - 1, page_bytes());
    const uintptr_t last = page_start(start + bytes, page_bytes());
    if (first >= last) return;
    madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    posix_fadvise(file, static_cast<off_t>(begin + (first - start)), static_cast<off_t>(last - first),
                  POSIX_FADV_DONTNEED);
}

size_t resident(const void* mapped, size_t bytes) {
    const auto start = reinterpret_cast<uintptr_t>(mapped);
    const uintptr_t first = page_start(start, page_bytes());
    std::vector<unsigned char> pages((start + bytes - first + page_bytes() - 1) / page_bytes());
    if (mincore(reinterpret_cast<void*>(first), start + bytes - first, pages.data()) != 0) return 0;
    size_t count = 0;
    for (const unsigned char page : pages) count += page & 1;
    return count * page_bytes();
}

int make_shared(size_t bytes) {
    const int descriptor = memfd_create("headrace", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor < 0) fail("no shared memory");
    if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0 ||
        fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        const int problem = errno;
        ::close(descriptor);
        errno = problem;
        fail("no shared memory of " + std::to_string(bytes) + " bytes");
    }
    return descriptor;
}

void* map_shared(int descriptor, size_t& bytes) {
    constexpr int kSealed = F_SEAL_SHRINK | F_SEAL_GROW;
    struct stat file;
    if (fstat(descriptor, &file) != 0) fail("the shared memory cannot be read");
    if (const int seals = fcntl(descriptor, F_GET_SEALS); seals < 0 || (seals & kSealed) != kSealed)
        throw std::runtime_error("the shared memory could change its size; it must be sealed");
    bytes = static_cast<size_t>(file.st_size);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) fail("the shared memory cannot be mapped");
    return memory;
}

void close(int descriptor) { ::close(descriptor); }

void sleep_on(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::milliseconds most) {
    const timespec time{most.count() / 1000, most.count() % 1000 * 1000000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void wake_all(const std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
}

int process_id() { return getpid(); }

int open_process(int process) {
    const auto descriptor = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
    return descriptor >= 0 ? descriptor : errno == ESRCH ? -1 : -2;
}

bool ended(int descriptor) {
    pollfd ready{descriptor, POLLIN, 0};
    return poll(&ready, 1, 0) == 1;
}

Features features() { return {getauxval(AT_HWCAP), getauxval(AT_HWCAP2)}; }

bool allow_tiles() {
#if defined(__x86_64__)
    constexpr int kRequestState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestState, kTileData) == 0;
#else
    return false;
#endif
}

}  // namespace headrace::os

namespace headrace {

std::vector<uintptr_t> node_borders(const void* data, int64_t stride, int64_t blocks, int nodes) {
    if (nodes < 2 || static_cast<size_t>(stride * blocks) < kLeastSpread) return {};
    const auto start = reinterpret_cast<uintptr_t>(data);
    std::vector<uintptr_t> borders{start};
    for (int node = 1; node < nodes; ++node) {
        const auto border = start + static_cast<uintptr_t>(stride * first_of_node(blocks, node, nodes));
        borders.push_back(std::max(borders.back(), os::page_start(border, uintptr_t{2} << 20)));
    }
    borders.push_back(start + static_cast<uintptr_t>(stride * blocks));
    return borders;
}

}  // namespace headrace
