// Python bindings of the KV pool, and of the attention of one layer for tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "bind/arrays.h"
#include "bind/bind.h"
#include "system/threadpool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using Rows = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Out = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Heads = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using OutHeads = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Int32s = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Blocks = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Masks = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using A8Out = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bf16Out = nb::ndarray<uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Pairs = std::vector<std::pair<int32_t, int32_t>>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using unlocked = nb::call_guard<nb::gil_scoped_release>;

void check_tokens(const KVPool& pool, int layer, const Int32s& positions, size_t n, size_t heads, size_t dim) {
    require(layer >= 0 && layer < pool.layers(), "no such layer");
    require(n == positions.size() && static_cast<int>(heads) == pool.shape().heads &&
                static_cast<int>(dim) == pool.shape().dim,
            "k and v must be [positions, heads, dim]");
    for (size_t i = 0; i < n; ++i) {
        const int32_t at = positions.data()[i];
        require(at >= 0 && at < pool.num_blocks() * pool.block_size(), "a position is outside the pool");
    }
}

void write_tokens(KVPool& pool, int layer, const Int32s& positions, const Heads& k, const Heads& v) {
    check_tokens(pool, layer, positions, k.shape(0), k.shape(1), k.shape(2));
    check_tokens(pool, layer, positions, v.shape(0), v.shape(1), v.shape(2));
    const Exclusive mine(pool.in_use);
    const size_t row = k.shape(1) * k.shape(2);
    for (size_t i = 0; i < positions.size(); ++i) {
        pool.write(*kernels().attention, layer, positions.data()[i], k.data() + i * row, v.data() + i * row);
    }
}

void read_tokens(const KVPool& pool, int layer, const Int32s& positions, const OutHeads& k, const OutHeads& v) {
    check_tokens(pool, layer, positions, k.shape(0), k.shape(1), k.shape(2));
    check_tokens(pool, layer, positions, v.shape(0), v.shape(1), v.shape(2));
    const Shared reader(pool.in_use);
    const size_t row = k.shape(1) * k.shape(2);
    for (size_t i = 0; i < positions.size(); ++i) {
        pool.read(*kernels().attention, layer, positions.data()[i], k.data() + i * row, v.data() + i * row);
    }
}

template <class T, class A>
std::vector<T> copied(const A& array) {
    return std::vector<T>(array.data(), array.data() + array.size());
}

// Parameters of a layer's attention.
struct Options {
    int heads = 1;
    float scale = 1.0f, softcap = 0.0f, norm_eps = 1e-6f;
    int window = 0;
    bool causal = true, source = false, shared = false, interleaved = false;
    BiasLines bias;
    std::vector<float> q_norm, k_norm, sinks, cos, sin;
    int rope_positions = 0;

    const float* or_null(const std::vector<float>& x) const { return x.empty() ? nullptr : x.data(); }
    AttentionView view() const { return {heads, window, causal, source, !bias.values.empty(), shared}; }
};

void set_rope(Options& self, const Table& cos, const Table& sin, bool interleaved) {
    require(cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1), "cos and sin must have the same shape");
    self.cos = copied<float>(cos);
    self.sin = copied<float>(sin);
    self.rope_positions = static_cast<int>(cos.shape(0));
    self.interleaved = interleaved;
}

// A step over a pool. It copies the arrays from Python.
class PyStep {
public:
    PyStep(KVPool& pool, ThreadPool& threads, const std::string& isa)
        : pool_(pool), threads_(threads), step_(kernels_named(isa), pool, threads.size()) {}
    PyStep(const PyStep&) = delete;

    void begin(const Int32s& positions, const Int32s& row_start, const Int32s& kv_start, const Int32s& known,
               const Blocks& tables, const std::optional<Masks>& masks, const std::optional<Int32s>& sources,
               const std::optional<Blocks>& source_tables) {
        const size_t feeds = kv_start.size();
        require(row_start.size() == feeds + 1 && known.size() == feeds && tables.shape(0) == feeds,
                "one entry per feed");
        require(row_start.data()[0] == 0 && static_cast<size_t>(row_start.data()[feeds]) == positions.size(),
                "row_start must go from 0 to the number of rows");
        positions_ = copied<int32_t>(positions);
        row_start_ = copied<int32_t>(row_start);
        kv_start_ = copied<int32_t>(kv_start);
        known_ = copied<int32_t>(known);
        tables_ = copied<int32_t>(tables);
        masks_ = masks ? copied<uint64_t>(*masks) : std::vector<uint64_t>();
        StepFeeds step{positions_, masks_, row_start_, kv_start_, known_, tables_, static_cast<int>(tables.shape(1))};
        if (sources) {
            require(source_tables && sources->size() == feeds && source_tables->shape(0) == feeds,
                    "a source for each feed, and its table");
            sources_ = copied<int32_t>(*sources), source_tables_ = copied<int32_t>(*source_tables);
            step.sources = sources_, step.source_tables = source_tables_;
            step.source_width = static_cast<int>(source_tables->shape(1));
        }
        step_.begin(step);
    }

    // Returns whether the attention items stored K and V themselves (AttentionLayout::fused).
    bool attend(int layer, const Rows& q, const std::optional<Rows>& k, const std::optional<Rows>& v,
                const Options& options, const std::optional<Out>& out, const std::optional<A8Out>& a8,
                const std::optional<Bf16Out>& bf16) {
        const Exclusive mine(pool_.in_use);
        const KVShape& kv = pool_.shape();
        const size_t rows = positions_.size(), width = static_cast<size_t>(options.heads) * static_cast<size_t>(kv.dim);
        check(layer, q, k, v, options);
        AttentionTask task{};
        task.q = q.data(), task.k = k ? k->data() : nullptr, task.v = v ? v->data() : nullptr;
        task.stride = q.stride(0);
        task.q_norm = options.or_null(options.q_norm), task.k_norm = options.or_null(options.k_norm);
        task.norm_eps = options.norm_eps;
        task.rope = {options.or_null(options.cos), options.or_null(options.sin), 0, options.interleaved};
        if (task.rope.cos) task.rope.dim = static_cast<int>(options.cos.size()) / options.rope_positions * 2;
        task.q_rope = task.rope;
        task.scale = options.scale, task.softcap = options.softcap;
        task.sinks = options.or_null(options.sinks);
        task.bias = {options.or_null(options.bias.values), options.bias.most};
        if (out) {
            require(out->shape(0) == rows && out->shape(1) == width, "out must be [rows, heads * dim]");
            task.out = out->data(), task.out_stride = static_cast<int64_t>(width);
        }
        if (a8) {
            require(kv.dim % 32 == 0, "A8 results need a head size that is a multiple of 32");
            require(a8->shape(0) == rows && a8->size() == a8_bytes(static_cast<int>(rows), static_cast<int>(width)),
                    "a8 must be [rows, bytes of a row of blocks]");
            task.a8 = {reinterpret_cast<A8Block*>(a8->data()), tiles_of(static_cast<int>(width))};
        }
        if (bf16) {
            require(bf16->shape(0) == rows && bf16->shape(1) >= width, "bf16 must be [rows, heads * dim or more]");
            task.bf16 = {bf16->data(), static_cast<int32_t>(bf16->shape(1))};
        }
        const nb::gil_scoped_release unlocked;
        AttentionLayout& layout = step_.layout(options.view());
        step_.prepare(layout, layer, task);
        run(layout, task);
        return layout.fused();
    }

    int items(const Options& options) { return step_.layout(options.view()).items(); }

private:
    void check(int layer, const Rows& q, const std::optional<Rows>& k, const std::optional<Rows>& v,
               const Options& options) const {
        const KVShape& kv = pool_.shape();
        const size_t rows = positions_.size(), width = static_cast<size_t>(options.heads) * static_cast<size_t>(kv.dim);
        const size_t kv_width = static_cast<size_t>(kv.heads * kv.dim);
        require(layer >= 0 && layer < pool_.layers(), "no such layer");
        require(options.heads > 0 && options.heads % kv.heads == 0, "heads must be a multiple of the pool's KV heads");
        require(options.view().stores() ? k && v : !k && !v, "rows have K and V, or read a source or another layer's");
        require(q.shape(0) == rows && q.shape(1) == width && (rows < 2 || q.stride(1) == 1),
                "q must be [rows, heads * dim]");
        for (const auto* side : {&k, &v}) {
            if (!*side) continue;
            require((*side)->shape(0) == rows && (*side)->shape(1) == kv_width,
                    "k and v must be [rows, KV heads * dim]");
            require(rows < 2 || ((*side)->stride(1) == 1 && (*side)->stride(0) == q.stride(0)),
                    "q, k and v must be columns of one array");
        }
        require(options.bias.values.empty() ||
                    options.bias.values.size() ==
                        static_cast<size_t>(options.heads) * static_cast<size_t>(bias_width(options.bias.most)),
                "one line of distances per head");
        const size_t dim = static_cast<size_t>(kv.dim);
        require((options.q_norm.empty() || options.q_norm.size() == dim) &&
                    (options.k_norm.empty() || options.k_norm.size() == dim),
                "a norm has one weight per dimension of a head");
        require(options.sinks.empty() || options.sinks.size() == static_cast<size_t>(options.heads),
                "one sink per head");
        require(options.window >= 0, "window must be 0 (none) or more");
        if (options.cos.empty()) return;
        require(options.cos.size() / static_cast<size_t>(options.rope_positions) * 2 <= dim,
                "rope turns more than a head has");
        for (const int32_t position : positions_) {
            require(position >= 0 && position < options.rope_positions, "a position is outside the rope table");
        }
    }

    void run(AttentionLayout& layout, const AttentionTask& task) {
        const size_t floats = step_.scratch_floats(task.heads / task.kv.heads) + 16;
        const size_t all = floats * static_cast<size_t>(threads_.size());
        if (scratch_.size() < all + 16) scratch_.resize(all + 16);
        const size_t skew = (64 - reinterpret_cast<uintptr_t>(scratch_.data()) % 64) % 64 / sizeof(float);
        std::atomic<int> next{0};
        threads_.run([&](int thread) {
            float* own = scratch_.data() + skew + floats / 16 * 16 * static_cast<size_t>(thread);
            if (!layout.fused()) {
                step_.append(task, thread, own);
                threads_.barrier(thread);
            }
            step_.attend(layout, task, next, own);
        });
    }

    KVPool& pool_;
    ThreadPool& threads_;
    AttentionStep step_;
    std::vector<int32_t> positions_, row_start_, kv_start_, known_, tables_, sources_, source_tables_;
    std::vector<uint64_t> masks_;
    std::vector<float> scratch_;
};

}  // namespace

void bind_attention(nb::module_& m) {
    m.attr("KV_SPLIT") = kSplit;
    nb::class_<KVPool>(m, "KVPool", "K and V of every layer in blocks of tokens.")
        .def(
            "__init__",
            [](KVPool* self, int layers, int num_blocks, int block_size, int heads, int dim, const std::string& dtype) {
                new (self) KVPool(parse_kv_type(dtype), layers, num_blocks, block_size, heads, dim);
            },
            "layers"_a, "num_blocks"_a, "block_size"_a, "heads"_a, "dim"_a, "dtype"_a = "bf16")
        .def_prop_ro("bytes", &KVPool::bytes)
        .def_prop_ro("num_blocks", &KVPool::num_blocks)
        .def_prop_ro("block_size", &KVPool::block_size)
        .def_static(
            "block_bytes",
            [](int layers, int block_size, int heads, int dim, const std::string& dtype) {
                return KVPool::block_bytes(parse_kv_type(dtype), layers, block_size, heads, dim);
            },
            "layers"_a, "block_size"_a, "heads"_a, "dim"_a, "dtype"_a = "bf16", "What one block takes in all layers.")
        .def(
            "copy_blocks", [](KVPool& self, const Pairs& pairs) { self.copy_blocks(pairs); }, "pairs"_a, unlocked(),
            "Copy whole blocks (from, to) of all layers; every source is read before anything is written.")
        .def(
            "move", [](KVPool& self, const Pairs& pairs) { self.move(pairs); }, "pairs"_a, unlocked(),
            "Copy flat positions (from, to) of all layers; every source is read before anything is written.")
        .def(
            "read_blocks",
            [](const KVPool& self, const std::vector<int32_t>& blocks, const OutBytes& out) {
                self.read_blocks(blocks, {out.data(), out.size()});
            },
            "blocks"_a, "out"_a.noconvert(), unlocked(),
            "Copy whole blocks of all layers into `out`. Steps may run meanwhile that do not write these blocks.")
        .def(
            "write_blocks",
            [](KVPool& self, const std::vector<int32_t>& blocks, const Bytes& bytes) {
                self.write_blocks(blocks, {bytes.data(), bytes.size()});
            },
            "blocks"_a, "bytes"_a.noconvert(), unlocked(), "Copy whole blocks of all layers into the pool.")
        .def("write", &write_tokens, "layer"_a, "positions"_a, "k"_a, "v"_a,
             "Store k, v [n, heads, dim] at flat positions [n].")
        .def("read", &read_tokens, "layer"_a, "positions"_a, "k"_a.noconvert(), "v"_a.noconvert(),
             "What the pool holds at flat positions [n], into k, v [n, heads, dim].");
    nb::class_<Options>(m, "AttentionOptions", "What a layer's attention is made of beside q, k and v.")
        .def(nb::init<>())
        .def_rw("heads", &Options::heads)
        .def_rw("scale", &Options::scale)
        .def_rw("softcap", &Options::softcap)
        .def_rw("norm_eps", &Options::norm_eps)
        .def_rw("window", &Options::window)
        .def_rw("causal", &Options::causal)
        .def_rw("source", &Options::source)
        .def_rw("shared", &Options::shared)
        .def(
            "set_bias",
            [](Options& self, const Table& values) {
                self.bias = bias_lines(values.data(), values.shape(0), values.shape(1));
            },
            "values"_a, "[heads, 2 d + 1], by distance from -d to d.")
        .def_rw("q_norm", &Options::q_norm)
        .def_rw("k_norm", &Options::k_norm)
        .def_rw("sinks", &Options::sinks)
        .def("set_rope", &set_rope, "cos"_a, "sin"_a, "interleaved"_a = false, "cos, sin: [positions, dim / 2].");
    nb::class_<PyStep>(m, "AttentionStep", "One step's feeds over a pool, layer by layer.")
        .def(nb::init<KVPool&, ThreadPool&, const std::string&>(), "pool"_a, "threads"_a, "isa"_a = "",
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def("begin", &PyStep::begin, "positions"_a, "row_start"_a, "kv_start"_a, "known"_a, "tables"_a,
             "masks"_a = nb::none(), "sources"_a = nb::none(), "source_tables"_a = nb::none())
        .def("attend", &PyStep::attend, "layer"_a, "q"_a, "k"_a.none(), "v"_a.none(), "options"_a,
             "out"_a.noconvert() = nb::none(), "a8"_a.noconvert() = nb::none(), "bf16"_a.noconvert() = nb::none(),
             "One layer -> out [rows, heads * dim] float32, or as A8 blocks, or bfloat16 bits. True if one phase was "
             "enough.")
        .def("items", &PyStep::items, "options"_a, "Into how many pieces of work the step is cut.");
}

}  // namespace headrace
