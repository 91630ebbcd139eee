// Python bindings that measure the machine's limits: memory read bandwidth and multiply-accumulates.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "kernels/probe.h"
#include "system/arena.h"
#include "system/threadpool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

// Runs f(thread) on all threads of the pool; returns the seconds of each repeat.
template <class F>
std::vector<double> seconds_of(ThreadPool& pool, int repeats, F f) {
    std::vector<double> seconds;
    for (int i = 0; i < repeats; ++i) {
        const auto start = std::chrono::steady_clock::now();
        pool.run(f);
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return seconds;
}

// Bytes per second that the threads read together from `mebibytes` MiB of memory, for each repeat.
std::vector<double> read_bandwidth(ThreadPool& pool, int mebibytes, int repeats, const std::string& isa) {
    require(mebibytes >= pool.size() && repeats > 0, "at least one MiB a thread and one repeat");
    const ProbeKernels& probe = *kernels_named(isa).probe;
    const nb::gil_scoped_release unlocked;
    Arena arena(size_t(mebibytes) << 20);
    const int64_t share = (int64_t(mebibytes) << 20) / pool.size() / 1024 * 1024;
    uint8_t* memory = arena.allocate(share * pool.size());
    pool.run([&](int thread) { std::memset(memory + thread * share, 1, share); });
    std::atomic<int> sink{0};
    std::vector<double> rates;
    for (const double seconds :
         seconds_of(pool, repeats, [&](int thread) { sink += probe.read(memory + thread * share, share); }))
        rates.push_back(double(share) * pool.size() / seconds);
    return rates;
}

// Multiply-accumulates per second of all threads together, in registers, for each repeat.
std::vector<double> dot_rate(ThreadPool& pool, const std::string& products, int repeats, const std::string& isa) {
    const ProbeKernels& probe = *kernels_named(isa).probe;
    require(products == "int8" || products == "bf16" || products == "f32",
            "products are int8, bf16 or f32, not " + products);
    require(repeats > 0, "at least one repeat");
    const auto run = products == "int8" ? probe.int8 : products == "bf16" ? probe.bf16 : probe.f32;
    constexpr int64_t kRounds = 20000;  // at most a millisecond
    const nb::gil_scoped_release unlocked;
    std::atomic<int64_t> count{0};
    std::vector<double> rates;
    for (const double seconds : seconds_of(pool, repeats, [&](int) {
             float sink[16];
             count = run(kRounds, sink);
         }))
        rates.push_back(double(count) * pool.size() / seconds);
    return rates;
}

}  // namespace

void bind_probe(nb::module_& m) {
    m.def("read_bandwidth", &read_bandwidth, "pool"_a, "mebibytes"_a = 256, "repeats"_a = 8, "isa"_a = "");
    m.def("dot_rate", &dot_rate, "pool"_a, "products"_a, "repeats"_a = 8, "isa"_a = "");
}

}  // namespace headrace
