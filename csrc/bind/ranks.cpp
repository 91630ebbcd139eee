// Python bindings of ranks: their region, and the loop of a rank that follows the leader.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <vector>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "program/program.h"
#include "ranks/ranks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

// Bytes for ids, positions, masks, tables and the like of a step, besides its hidden rows.
constexpr int64_t kMessageBytes = 16 << 20;
constexpr int64_t kMessageRow = 64;

Region::Sizes sizes_for(int world, int rows, int width, int vocab) {
    require(rows > 0 && width > 0 && vocab > 0, "a region has rows, a width and a vocabulary");
    const auto row = static_cast<int64_t>(Buffer::stride_of(width)) * static_cast<int64_t>(sizeof(float));
    const int64_t logits = Buffer::stride_of(vocab) + Buffer::stride_of((vocab + kVocabBlock - 1) / kVocabBlock);
    return {world, rows * row, Program::kMostHeadRows * logits * static_cast<int64_t>(sizeof(float)),
            kMessageBytes + rows * (kMessageRow + row)};
}

void py_follow(Ranks& ranks, const std::vector<std::shared_ptr<Program>>& programs) {
    std::vector<Program*> all;
    for (const auto& each : programs) all.push_back(each.get());
    const nb::gil_scoped_release unlocked;
    follow(ranks, all);
}

// Adds x over the ranks `count` times. Returns the sum and the seconds of each exchange.
std::pair<Array<float>, Array<double>> time_exchanges(Ranks& ranks, const FloatVector& x, size_t count) {
    auto [sum, sums] = new_array<float>({x.size()});
    auto [took, seconds] = new_array<double>({count});
    {
        const nb::gil_scoped_release unlocked;
        for (size_t i = 0; i < count; ++i) {
            const auto start = Ranks::Clock::now();
            ranks.add_all({x.data(), x.size()}, sum);
            took[i] = std::chrono::duration<double>(Ranks::Clock::now() - start).count();
        }
    }
    return {sums, seconds};
}

}  // namespace

void bind_ranks(nb::module_& m) {
    nb::exception<RankLost>(m, "RankLost", PyExc_RuntimeError);
    nb::class_<Region>(m, "Region", "Shared memory of the ranks of one model.")
        .def(
            "__init__",
            [](Region* self, int world, int rows, int width, int vocab) {
                new (self) Region(sizes_for(world, rows, width, vocab));
            },
            "world"_a, "rows"_a, "width"_a, "vocab"_a,
            "rows: most rows of a step. width: widest row that is summed or gathered. vocab: largest vocabulary.")
        .def_static(
            "open", [](int descriptor) { return std::make_shared<Region>(descriptor); }, "descriptor"_a,
            "Map the region of another process. The descriptor may be closed then.")
        .def_prop_ro("descriptor", &Region::descriptor, "File descriptor for the other ranks; -1 for an opened region.")
        .def_prop_ro("world", &Region::world);
    nb::class_<Ranks>(m, "Ranks", "One rank of those that share a region.")
        .def(
            "__init__",
            [](Ranks* self, std::shared_ptr<Region> region, int rank, double timeout) {
                require(timeout > 0 && timeout < 1e6, "a timeout is a number of seconds");
                new (self)
                    Ranks(std::move(region), rank, std::chrono::milliseconds(static_cast<int64_t>(timeout * 1e3)));
            },
            "region"_a, "rank"_a, "timeout"_a = 30.0,
            "timeout: seconds after which a rank that does not answer is lost. A process that ended is lost at once.")
        .def_prop_ro("rank", &Ranks::rank)
        .def_prop_ro("world", &Ranks::world)
        .def_prop_ro("lost", &Ranks::reason, "Why a rank is lost, one line; empty if none is.")
        .def("end", &Ranks::end, nb::call_guard<nb::gil_scoped_release>(),
             "Leader: the other ranks return from `follow`.")
        .def("give_up", &Ranks::give_up, "Make this rank count as lost.");
    m.def(
        "time_exchanges", &time_exchanges, "ranks"_a, "x"_a, "count"_a,
        "Add x [n] over the ranks `count` times; all ranks call it. Returns the sum and the seconds of each exchange.");
    m.def("follow", &py_follow, "ranks"_a, "programs"_a,
          "Carry out the leader's commands, for programs by number, until it ends. Raises RankLost.");
}

}  // namespace headrace
