// Python bindings for the weight loader: CPU information, thread pools, packed weights.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/bound_weights.h"
#include "pack/pack.h"
#include "system/in_use.h"
#include "system/nodes.h"
#include "system/os.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;
using WholeBytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
constexpr int kMostRows = 1 << 30;  // most rows and columns: padded sizes fit 32 bits

using Tensor = BoundTensor;
using Linear = BoundLinear;

PackRequest request_of(const Bytes& rows, const std::string& kind, int n, int k,
                       const std::optional<Indices>& permutation, const std::string& quantize,
                       const std::optional<FloatVector>& bias) {
    const SourceKind source = parse_source_kind(kind);
    require(n > 0 && k > 0 && n <= kMostRows && k <= kMostRows, "n and k must be positive, and at most 2^30");
    require(rows.stride(1) == 1 || rows.shape(1) == 1, "the bytes of a row must lie side by side");
    require(static_cast<int64_t>(rows.shape(1)) == source_row_bytes(source, k),
            "a row of " + std::to_string(k) + " columns of " + kind + " has " +
                std::to_string(source_row_bytes(source, k)) + " bytes, not " + std::to_string(rows.shape(1)));
    require(permutation ? permutation->shape(0) == size_t(n) : rows.shape(0) == size_t(n),
            permutation ? "permutation must have n entries" : "rows must hold n rows");
    if (permutation) {
        for (int i = 0; i < n; ++i) {
            const int32_t row = permutation->data()[i];
            require(row >= 0 && row < int64_t(rows.shape(0)), "permutation names a row that is not there");
        }
    }
    require(!bias || bias->shape(0) == size_t(n), "bias must have n entries");
    return {{rows.data(), rows.stride(0), source, permutation ? permutation->data() : nullptr},
            packed_kind(source, quantize),
            n,
            k,
            bias ? bias->data() : nullptr};
}

Tensor py_pack(const Bytes& rows, const std::string& kind, int n, int k, std::shared_ptr<Arena> arena, ThreadPool& pool,
               const std::optional<Indices>& permutation, const std::string& quantize,
               const std::optional<FloatVector>& bias, const std::string& isa) {
    const PackRequest request = request_of(rows, kind, n, k, permutation, quantize, bias);
    const Kernels& table = kernels_named(isa);
    const nb::gil_scoped_release unlocked;
    return {pack_tensor(request, table, *arena, pool), std::move(arena)};
}

std::pair<Tensor, Tensor> py_pack_pair(const Bytes& gate, const std::string& gate_kind, const Bytes& up,
                                       const std::string& up_kind, int n, int k, std::shared_ptr<Arena> arena,
                                       ThreadPool& pool, const std::string& quantize, const std::string& isa) {
    const PackRequest first = request_of(gate, gate_kind, n, k, {}, quantize, {});
    const PackRequest second = request_of(up, up_kind, n, k, {}, quantize, {});
    const Kernels& table = kernels_named(isa);
    const nb::gil_scoped_release unlocked;
    const auto [a, b] = pack_pair(first, second, table, *arena, pool);
    return {{a, arena}, {b, arena}};
}

// A Packer that keeps the source arrays alive until they are packed, and the arena alive. `mapped`: the rows are in a
// mapped file.
class BoundPacker {
public:
    explicit BoundPacker(std::shared_ptr<Arena> arena) : arena_(std::move(arena)), packer_(*arena_) {}

    Tensor add(const Bytes& rows, const std::string& kind, int n, int k, const std::optional<Indices>& permutation,
               const std::string& quantize, const std::optional<FloatVector>& bias, bool mapped) {
        const Exclusive mine(in_use_);
        PackRequest request = request_of(rows, kind, n, k, permutation, quantize, bias);
        if (mapped) request.mapped_bytes = bytes_of(rows);
        const PackedTensor tensor = packer_.add(request, kernels());
        kept_.push_back({rows, permutation, bias});
        return {tensor, arena_};
    }

    std::pair<Tensor, Tensor> add_pair(const Bytes& gate, const std::string& gate_kind, const Bytes& up,
                                       const std::string& up_kind, int n, int k, const std::string& quantize,
                                       bool mapped) {
        const Exclusive mine(in_use_);
        PackRequest first = request_of(gate, gate_kind, n, k, {}, quantize, {});
        PackRequest second = request_of(up, up_kind, n, k, {}, quantize, {});
        if (mapped) first.mapped_bytes = bytes_of(gate), second.mapped_bytes = bytes_of(up);
        const auto [a, b] = packer_.add_pair(first, second, kernels());
        kept_.push_back({gate, {}, {}});
        kept_.push_back({up, {}, {}});
        return {{a, arena_}, {b, arena_}};
    }

    std::vector<int> run(ThreadPool& pool, size_t bytes) {
        const Exclusive mine(in_use_);
        std::vector<int> broken;
        {
            const nb::gil_scoped_release unlocked;
            broken = packer_.run(pool, bytes);
        }
        while (kept_.size() > static_cast<size_t>(packer_.waiting())) kept_.pop_front();
        return broken;
    }

    int waiting() const {
        const Shared reader(in_use_);
        return packer_.waiting();
    }

private:
    struct Kept {
        Bytes rows;
        std::optional<Indices> permutation;
        std::optional<FloatVector> bias;
    };

    // From the first byte to the end of the last row, whose stride may reach beyond the file.
    static size_t bytes_of(const Bytes& rows) {
        return rows.shape(0) == 0 ? 0 : (rows.shape(0) - 1) * static_cast<size_t>(rows.stride(0)) + rows.shape(1);
    }

    std::shared_ptr<Arena> arena_;
    Packer packer_;
    mutable InUse in_use_;
    std::deque<Kept> kept_;  // one for each tensor that is not packed yet
};

Array<float> unpack(const Tensor& tensor, const std::optional<Indices>& rows, const std::string& isa) {
    const Kernels& table = kernels_named(isa);
    const size_t count = rows ? rows->shape(0) : tensor.packed.n, k = tensor.packed.k;
    for (size_t i = 0; rows && i < count; ++i) {
        require(rows->data()[i] >= 0 && rows->data()[i] < tensor.packed.n, "no such row");
    }
    auto [data, array] = new_array<float>({count, k});
    const nb::gil_scoped_release unlocked;
    for (size_t i = 0; i < count; ++i) table.pack->unpack(tensor.packed, rows ? rows->data()[i] : int(i), data + i * k);
    return array;
}

Linear make_linear(std::vector<Tensor> tensors, bool gated, int segment_unit, const PackedShare& share) {
    std::vector<PackedTensor> parts;
    for (const Tensor& tensor : tensors) parts.push_back(tensor.packed);
    return {PackedLinear(std::move(parts), gated, segment_unit, share), std::move(tensors)};
}

// The tensor with another bias, for a head that shares the token embeddings.
Tensor with_bias(const Tensor& tensor, const FloatVector& bias) {
    require(static_cast<int64_t>(bias.shape(0)) == tensor.packed.n, "bias must have n entries");
    Tensor copy = tensor;
    const size_t count = static_cast<size_t>(copy.packed.row_blocks()) * 16;
    auto* own = reinterpret_cast<float*>(copy.arena->allocate(count * sizeof(float)));
    if (!copy.arena->filled()) std::copy(bias.data(), bias.data() + bias.shape(0), own);
    copy.packed.bias = own;
    return copy;
}

int64_t bytes_packed(const std::string& kind, int64_t n, int64_t k, const std::string& quantize) {
    require(n > 0 && k > 0 && n <= kMostRows && k <= kMostRows, "n and k must be positive, and at most 2^30");
    return row_block_bytes(packed_kind(parse_source_kind(kind), quantize), static_cast<int32_t>(k)) * ((n + 15) / 16);
}

nb::dict cpu_info() {
    nb::dict info;
    nb::list isas;
    for (const Isa isa : supported_isas()) isas.append(std::string(isa_name(isa)));
    info["isas"] = isas;
    info["isa"] = std::string(isa_name(kernels().isa));
    info["cpus"] = os::allowed_cpus().size();
    info["quota"] = os::quota();
    info["threads"] = default_threads();
    info["nodes"] = os::current_nodes().size();
    return info;
}

// For tests: crosses 2 * `barriers` barriers on every thread. Returns for each thread how often another thread was not
// at the same barrier.
std::vector<int> pool_barriers(ThreadPool& pool, int barriers) {
    const nb::gil_scoped_release unlocked;
    std::vector<std::atomic<int>> reached(pool.size());
    std::vector<int> wrong(pool.size());
    pool.run([&](int thread) {
        for (int i = 1; i <= barriers; ++i) {
            reached[thread].store(i, std::memory_order_relaxed);
            pool.barrier(thread);
            for (const auto& other : reached) wrong[thread] += other.load(std::memory_order_relaxed) != i;
            pool.barrier(thread);
        }
    });
    return wrong;
}

}  // namespace

void bind_pack(nb::module_& m) {
    nb::exception<ForkedError>(m, "ForkedError", PyExc_RuntimeError);
    nb::exception<ThreadsError>(m, "ThreadsError", PyExc_RuntimeError);
    m.def("cpu_info", &cpu_info, "Instruction sets, the one in use, CPUs, quota, threads, memory nodes.");
    m.def("cgroup_cpus", &os::quota, "membership"_a = os::kMembership, "root"_a = os::kControlGroups);
    m.def("default_threads", &default_threads, "quota"_a,
          "What a pool of 0 threads has, where the quota is so many CPUs.");
    nb::class_<ThreadPool>(m, "ThreadPool")
        .def(
            "__init__",
            [](ThreadPool* self, int threads, bool pin) {
                new (self) ThreadPool(threads ? threads : default_threads(), pin);
            },
            "threads"_a = 0, "pin"_a = false)
        .def_prop_ro("size", &ThreadPool::size)
        .def("set_spin", &ThreadPool::set_spin, "microseconds"_a)
        .def("test_barriers", &pool_barriers, "barriers"_a, "Per thread, how often it saw another on the wrong side.");
    nb::class_<Arena>(m, "Arena")
        .def(nb::init<size_t>(), "block_bytes"_a = size_t{256} << 20)
        .def(
            "__init__",
            [](Arena* self, size_t block_bytes, int file, bool filled) { new (self) Arena(block_bytes, file, filled); },
            "block_bytes"_a, "file"_a, "filled"_a = false,
            "Memory in an empty file; the descriptor may be closed afterwards. filled: read-only memory in a file that "
            "another arena has filled by the same calls.")
        .def_prop_ro("filled", &Arena::filled)
        .def_prop_ro("used", &Arena::used)
        .def_prop_ro(
            "resident", [](const Arena& self) { return self.resident(); },
            "Bytes of an arena in a file that are in memory.")
        .def("write_back", &Arena::write_back, nb::call_guard<nb::gil_scoped_release>(),
             "Write all changed pages to the file and release them.");
    nb::class_<Tensor>(m, "PackedTensor")
        .def_prop_ro("kind", [](const Tensor& t) { return std::string(packed_kind_name(t.packed.kind)); })
        .def_prop_ro("n", [](const Tensor& t) { return t.packed.n; })
        .def_prop_ro("k", [](const Tensor& t) { return t.packed.k; })
        .def_prop_ro("nbytes",
                     [](const Tensor& t) { return row_block_bytes(t.packed.kind, t.packed.k) * t.packed.row_blocks(); })
        .def("unpack", &unpack, "rows"_a = nb::none(), "isa"_a = "")
        .def("with_bias", &with_bias, "bias"_a, "The same rows with a bias [n], which is copied.");
    nb::class_<Linear>(m, "PackedLinear")
        .def(
            "__init__",
            [](Linear* self, std::vector<Tensor> tensors, bool gated, int segment_unit, std::pair<int, int> share,
               int columns, int start) {
                new (self) Linear(
                    make_linear(std::move(tensors), gated, segment_unit, {share.first, share.second, columns, start}));
            },
            "tensors"_a, "gated"_a = false, "segment_unit"_a = 0, "share"_a = std::pair(0, 1), "columns"_a = 0,
            "start"_a = 0,
            "share: (rank, world) of a layer that is cut along its `columns` columns; the tensors hold those from "
            "`start` on.")
        .def_prop_ro("n", [](const Linear& l) { return l.packed.n(); })
        .def_prop_ro("k", [](const Linear& l) { return l.packed.k(); })
        .def_prop_ro(
            "inputs", [](const Linear& l) { return l.packed.inputs(); }, "Columns of the input: k, or the share's.")
        .def_prop_ro(
            "begin", [](const Linear& l) { return l.packed.segments().begin; }, "The first tile that is multiplied.")
        .def_prop_ro("tensors", [](const Linear& l) { return l.tensors; })
        .def_prop_rw(
            "direct_rows", [](const Linear& l) { return l.packed.direct_rows; },
            [](Linear& l, int rows) {
                require(rows >= 0, "a number of rows is not negative");
                l.packed.direct_rows = rows;
            },
            "Panels are used above this number of rows; 0: the default of the instruction set. Set before a "
            "program takes the layer.")
        .def_prop_ro("segments", [](const Linear& l) {
            const Segments& s = l.packed.segments();
            return std::vector<int>(s.end, s.end + s.count);
        });
    nb::class_<BoundPacker>(m, "Packer")
        .def(nb::init<std::shared_ptr<Arena>>(), "arena"_a)
        .def("add", &BoundPacker::add, "rows"_a.noconvert(), "kind"_a, "n"_a, "k"_a, "permutation"_a = nb::none(),
             "quantize"_a = "", "bias"_a = nb::none(), "mapped"_a = false)
        .def("add_pair", &BoundPacker::add_pair, "gate"_a.noconvert(), "gate_kind"_a, "up"_a.noconvert(), "up_kind"_a,
             "n"_a, "k"_a, "quantize"_a = "", "mapped"_a = false)
        .def("run", &BoundPacker::run, "pool"_a, "bytes"_a)
        .def_prop_ro("waiting", &BoundPacker::waiting);
    m.def("pack", &py_pack, "rows"_a.noconvert(), "kind"_a, "n"_a, "k"_a, "arena"_a, "pool"_a,
          "permutation"_a = nb::none(), "quantize"_a = "", "bias"_a = nb::none(), "isa"_a = "");
    m.def("pack_pair", &py_pack_pair, "gate"_a.noconvert(), "gate_kind"_a, "up"_a.noconvert(), "up_kind"_a, "n"_a,
          "k"_a, "arena"_a, "pool"_a, "quantize"_a = "", "isa"_a = "");
    m.def(
        "release_pages", [](const WholeBytes& mapped) { os::forget(mapped.data(), mapped.nbytes()); },
        "mapped"_a.noconvert(),
        "Let the pages of a view of a mapped file go; they are read again when they are needed. Never for other "
        "memory.");
    m.def(
        "column_shares",
        [](int columns, int segment_unit, int world) {
            std::vector<std::pair<int, int>> shares;
            for (int rank = 0; rank < world; ++rank) {
                const Columns mine = columns_of_rank(columns, segment_unit, rank, world);
                shares.emplace_back(mine.begin, mine.end);
            }
            return shares;
        },
        "columns"_a, "segment_unit"_a, "world"_a, "Columns [begin, end) of each rank in a layer that is cut along k.");
    m.def(
        "block_columns",
        [](const std::string& kind, const std::string& quantize) {
            return 64 * layout_of(packed_kind(parse_source_kind(kind), quantize)).tiles();
        },
        "kind"_a, "quantize"_a = "", "Columns of a block of the packed format: 64, 128 or 256.");
    m.def("packed_bytes", &bytes_packed, "kind"_a, "n"_a, "k"_a, "quantize"_a = "",
          "Bytes that n rows of k columns of a stored kind take once they are packed, padding included.");
}

}  // namespace headrace
