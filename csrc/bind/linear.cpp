// Python bindings of linear layers and of activation quantization, for tests and benchmarks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/bound_weights.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using Linear = BoundLinear;

// 64-byte aligned memory for one call.
class Buffer {
public:
    explicit Buffer(size_t bytes) : memory_(::operator new(bytes + 1, std::align_val_t{64})) {}
    ~Buffer() { ::operator delete(memory_, std::align_val_t{64}); }
    Buffer(const Buffer&) = delete;
    void* get() { return memory_; }

private:
    void* memory_;
};

Activation parse_activation(const std::string& name) {
    require(name == "silu" || name == "gelu_tanh" || name == "gelu",
            "activation must be silu, gelu_tanh or gelu, not " + name);
    return name == "silu" ? Activation::kSilu : name == "gelu" ? Activation::kGelu : Activation::kGeluTanh;
}

Norm parse_norm(const std::string& kind, const std::optional<FloatVector>& weight,
                const std::optional<FloatVector>& bias, float eps, size_t k) {
    require(kind.empty() || kind == "rms" || kind == "layer", "norm must be rms or layer, not " + kind);
    if (kind.empty()) return {NormKind::kNone, nullptr, nullptr, 0.0f};
    require(weight && weight->shape(0) == k && (!bias || bias->shape(0) == k),
            "norm weights must have one entry per column");
    return {kind == "rms" ? NormKind::kRms : NormKind::kLayer, weight->data(), bias ? bias->data() : nullptr, eps};
}

// Quantizes rows; returns arrays: q int8 [m, kp], scale and scaled_sum float32 [m, kp / 32], negative sums int32
// [m, kp / 32] and [m, kp / 16]. With "split" also the outliers: columns int32 [m, 64], padded with -1, and values
// float32 [m, 64].
nb::tuple quantize_a8(const Floats& x, const std::string& norm, const std::optional<FloatVector>& weight,
                      const std::optional<FloatVector>& bias, float eps, const std::string& isa,
                      const std::string& activations, float threshold) {
    const size_t m = x.shape(0), k = x.shape(1), tiles = tiles_of(k);
    const Norm spec = parse_norm(norm, weight, bias, eps, k);
    const Rounding rounding = rounding_named(activations);
    Buffer buffer(a8_bytes(m, k, rounding)), scratch((k + 16) * sizeof(float));
    const A8 a8 = a8_at(buffer.get(), m, k, rounding, threshold);
    kernels_named(isa).quantize->to_a8(x.data(), k, 0, m, k, spec, static_cast<float*>(scratch.get()), a8);
    auto [q, q_array] = new_array<int8_t>({m, tiles * 64});
    auto [scale, scale_array] = new_array<float>({m, tiles * 2});
    auto [sum, sum_array] = new_array<float>({m, tiles * 2});
    auto [neg32, neg32_array] = new_array<int32_t>({m, tiles * 2});
    auto [neg16, neg16_array] = new_array<int32_t>({m, tiles * 4});
    for (size_t i = 0; i < m * tiles; ++i) {
        const A8Block& block = a8.blocks[i];
        std::copy(block.q, block.q + 64, q + 64 * i);
        std::copy(block.scale, block.scale + 2, scale + 2 * i);
        std::copy(block.scaled_sum, block.scaled_sum + 2, sum + 2 * i);
        std::copy(block.neg_sum32, block.neg_sum32 + 2, neg32 + 2 * i);
        std::copy(block.neg_sum16, block.neg_sum16 + 4, neg16 + 4 * i);
    }
    if (!a8.outliers) return nb::make_tuple(q_array, scale_array, sum_array, neg32_array, neg16_array);
    auto [column, column_array] = new_array<int32_t>({m, kMostOutliers});
    auto [value, value_array] = new_array<float>({m, kMostOutliers});
    for (size_t r = 0; r < m; ++r) {
        const Outliers& outliers = a8.outliers[r];
        std::fill(column + r * kMostOutliers, column + (r + 1) * kMostOutliers, -1);
        std::copy(outliers.column, outliers.column + outliers.count, column + r * kMostOutliers);
        std::copy(outliers.value, outliers.value + outliers.count, value + r * kMostOutliers);
    }
    return nb::make_tuple(q_array, scale_array, sum_array, neg32_array, neg16_array, column_array, value_array);
}

Array<float> norm_rows(const Floats& x, const std::string& norm, const FloatVector& weight,
                       const std::optional<FloatVector>& bias, float eps, const std::string& isa) {
    const size_t m = x.shape(0), k = x.shape(1);
    const Norm spec = parse_norm(norm, weight, bias, eps, k);
    require(spec.kind != NormKind::kNone, "norm must be rms or layer");
    auto [out, array] = new_array<float>({m, k});
    kernels_named(isa).quantize->norm(x.data(), k, 0, m, k, spec, out, k);
    return array;
}

Array<float> activate(const std::string& name, const Floats& x, const std::optional<Floats>& up,
                      const std::string& isa) {
    auto [out, array] = new_array<float>({x.shape(0), x.shape(1)});
    const Activation kind = parse_activation(name);
    require(!up || (up->shape(0) == x.shape(0) && up->shape(1) == x.shape(1)), "gate and up must have the same shape");
    const QuantizeKernels& table = *kernels_named(isa).quantize;
    if (up) {
        table.act_mul(kind, x.data(), up->data(), x.size(), out);
    } else {
        table.act(kind, x.data(), x.size(), out);
    }
    return array;
}

// A layer's input, converted to its input format.
struct Input {
    Input(const Linear& linear, const Floats& x, const Kernels& table, Rounding rounding = Rounding::kGroup,
          float threshold = 0.0f)
        : buffer(linear.packed.bf16() ? x.shape(0) * tiles_of(x.shape(1)) * 128
                                      : a8_bytes(x.shape(0), x.shape(1), rounding)) {
        const int m = x.shape(0), k = x.shape(1), tiles = tiles_of(k);
        const Norm none{NormKind::kNone, nullptr, nullptr, 0.0f};
        if (linear.packed.bf16()) {
            bf16 = {static_cast<uint16_t*>(buffer.get()), tiles * 64};
            table.quantize->to_bf16(x.data(), k, 0, m, k, none, nullptr, bf16);
        } else {
            a8 = a8_at(buffer.get(), m, k, rounding, threshold);
            table.quantize->to_a8(x.data(), k, 0, m, k, none, nullptr, a8);
        }
    }

    Buffer buffer;
    A8 a8{};
    Bf16Rows bf16{};
};

void run_on(ThreadPool& pool, LinearWork work) {
    work.threads = pool.size();
    Buffer scratch(kLinearScratchBytes * pool.size());
    std::atomic<int> next{0};
    pool.run([&](int thread) {
        run_linear(work, thread, next, static_cast<uint8_t*>(scratch.get()) + thread * kLinearScratchBytes);
    });
}

int rows_of_path(const std::string& path) {
    require(path.empty() || path == "direct" || path == "panels", "path must be direct or panels, not " + path);
    return path.empty() ? 0 : path == "direct" ? 1 << 30 : -1;
}

void check_input(const Linear& linear, const Floats& x) {
    require(x.shape(1) == size_t(linear.packed.k()),
            "x must have " + std::to_string(linear.packed.k()) + " columns, not " + std::to_string(x.shape(1)));
    require(x.shape(0) > 0, "x must have at least one row");
}

Array<float> linear(const Linear& linear, const Floats& x, ThreadPool& pool, const std::optional<Floats>& add_to,
                    const std::string& path, const std::string& isa, const std::string& activations, float threshold) {
    check_input(linear, x);
    require(!linear.packed.gated(), "a gated layer has gated(), not linear()");
    const size_t m = x.shape(0), n = linear.packed.n();
    require(!add_to || (add_to->shape(0) == m && add_to->shape(1) == n), "add_to must be [rows, outputs]");
    const Kernels& table = kernels_named(isa);
    auto [out, array] = new_array<float>({m, n});
    if (add_to) std::copy(add_to->data(), add_to->data() + m * n, out);
    const Rounding rounding = rounding_named(activations);
    const nb::gil_scoped_release unlocked;
    const Input input(linear, x, table, rounding, threshold);
    Epilogue epilogue{};
    epilogue.kind = add_to ? EpilogueKind::kAdd : EpilogueKind::kStore;
    epilogue.out = out;
    epilogue.stride = n;
    run_on(pool, {&table, &linear.packed, input.a8, input.bf16, int(m), 0, epilogue, rows_of_path(path)});
    return array;
}

// act(x gate^T) * (x up^T) as float32, and the same after conversion to the next layer's input and back to float32.
nb::tuple gated(const Linear& linear, const Floats& x, ThreadPool& pool, const std::string& act,
                const std::string& path, const std::string& isa, const std::string& activations, float threshold) {
    check_input(linear, x);
    require(linear.packed.gated(), "this layer is not gated");
    const size_t m = x.shape(0), n = linear.packed.n(), tiles = tiles_of(n);
    const Kernels& table = kernels_named(isa);
    auto [out, array] = new_array<float>({m, n});
    auto [q, q_array] = new_array<float>({m, tiles * 64});
    auto [narrow, narrow_array] = new_array<float>({m, tiles * 64});
    Buffer a8(a8_bytes(m, n)), bf16(m * tiles * 128);
    Epilogue epilogue{};
    epilogue.kind = EpilogueKind::kGated;
    epilogue.act = parse_activation(act);
    epilogue.out = out;
    epilogue.stride = n;
    epilogue.a8 = {static_cast<A8Block*>(a8.get()), int32_t(tiles)};
    epilogue.bf16 = {static_cast<uint16_t*>(bf16.get()), int32_t(tiles * 64)};
    const Rounding rounding = rounding_named(activations);
    const nb::gil_scoped_release unlocked;
    const Input input(linear, x, table, rounding, threshold);
    run_on(pool, {&table, &linear.packed, input.a8, input.bf16, int(m), 0, epilogue, rows_of_path(path)});
    for (size_t i = 0; i < m * tiles * 64; ++i) {
        const A8Block& block = epilogue.a8.blocks[i / 64];
        q[i] = block.scale[i % 64 / 32] * static_cast<float>(block.q[i % 64]);
        const uint32_t wide = uint32_t{epilogue.bf16.x[i]} << 16;
        std::memcpy(narrow + i, &wide, 4);
    }
    const nb::gil_scoped_acquire locked;
    return nb::make_tuple(array, q_array, narrow_array);
}

// Logits: scale * y, soft-capped; and the block maxima.
nb::tuple logits(const Linear& linear, const Floats& x, ThreadPool& pool, float scale, float softcap,
                 const std::string& path, const std::string& isa, const std::string& activations, float threshold) {
    check_input(linear, x);
    require(linear.packed.parts().size() == 1, "logits come from a layer of one tensor");
    const size_t m = x.shape(0), n = linear.packed.n(), blocks = (n + 63) / 64;
    const Kernels& table = kernels_named(isa);
    auto [out, array] = new_array<float>({m, n});
    auto [maxima, maxima_array] = new_array<float>({m, blocks});
    Epilogue epilogue{};
    epilogue.kind = EpilogueKind::kLogits;
    epilogue.out = out;
    epilogue.stride = n;
    epilogue.scale = scale;
    epilogue.softcap = softcap;
    epilogue.block_max = maxima;
    epilogue.max_stride = blocks;
    const Rounding rounding = rounding_named(activations);
    {
        const nb::gil_scoped_release unlocked;
        const Input input(linear, x, table, rounding, threshold);
        run_on(pool, {&table, &linear.packed, input.a8, input.bf16, int(m), 0, epilogue, rows_of_path(path)});
    }
    return nb::make_tuple(array, maxima_array);
}

// Measures `repeats` passes over layers of one size, with a barrier after each layer like in a program. Returns the
// seconds of each pass. Gated layers write A8.
std::vector<double> time_linears(const std::vector<const Linear*>& linears, const Floats& x, ThreadPool& pool,
                                 int repeats, const std::string& path, const std::string& isa,
                                 const std::string& activations) {
    require(!linears.empty() && repeats > 0, "at least one layer and one repeat");
    for (const Linear* each : linears) {
        require(each != nullptr, "no layer may be missing");
        check_input(*each, x);
    }
    const Kernels& table = kernels_named(isa);
    const Rounding rounding = rounding_named(activations);
    const nb::gil_scoped_release unlocked;
    const size_t m = x.shape(0), n = linears.front()->packed.n();
    const bool gated = linears.front()->packed.gated();
    const Input input(*linears.front(), x, table, rounding, 1.0f);
    Buffer out(gated ? a8_bytes(m, n) : m * n * sizeof(float)), scratch(kLinearScratchBytes * pool.size());
    Epilogue epilogue{};
    epilogue.kind = gated ? EpilogueKind::kGated : EpilogueKind::kStore;
    if (gated) epilogue.a8 = {static_cast<A8Block*>(out.get()), tiles_of(n)};
    if (!gated) epilogue.out = static_cast<float*>(out.get());
    epilogue.stride = n;
    std::vector<LinearWork> works;
    for (const Linear* each : linears) {
        works.push_back(
            {&table, &each->packed, input.a8, input.bf16, int(m), pool.size(), epilogue, rows_of_path(path)});
    }
    std::vector<double> seconds;
    for (int i = 0; i < repeats; ++i) {
        std::vector<std::atomic<int>> next(works.size());
        const auto start = std::chrono::steady_clock::now();
        pool.run([&](int thread) {
            for (size_t j = 0; j < works.size(); ++j) {
                run_linear(works[j], thread, next[j],
                           static_cast<uint8_t*>(scratch.get()) + thread * kLinearScratchBytes);
                pool.barrier(thread);
            }
        });
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return seconds;
}

}  // namespace

void bind_linear(nb::module_& m) {
    m.def("time_linears", &time_linears, "linears"_a, "x"_a.noconvert(), "pool"_a, "repeats"_a, "path"_a = "",
          "isa"_a = "", "activations"_a = "group");
    m.def("quantize_a8", &quantize_a8, "x"_a.noconvert(), "norm"_a = "", "weight"_a = nb::none(), "bias"_a = nb::none(),
          "eps"_a = 0.0f, "isa"_a = "", "activations"_a = "group", "threshold"_a = 6.0f);
    m.def("norm", &norm_rows, "x"_a.noconvert(), "kind"_a, "weight"_a, "bias"_a = nb::none(), "eps"_a = 0.0f,
          "isa"_a = "");
    m.def("activate", &activate, "name"_a, "x"_a.noconvert(), "up"_a = nb::none(), "isa"_a = "");
    m.def("linear", &linear, "linear"_a, "x"_a.noconvert(), "pool"_a, "add_to"_a = nb::none(), "path"_a = "",
          "isa"_a = "", "activations"_a = "group", "threshold"_a = 6.0f);
    m.def("gated", &gated, "linear"_a, "x"_a.noconvert(), "pool"_a, "act"_a = "silu", "path"_a = "", "isa"_a = "",
          "activations"_a = "group", "threshold"_a = 6.0f);
    m.def("logits", &logits, "linear"_a, "x"_a.noconvert(), "pool"_a, "scale"_a = 1.0f, "softcap"_a = 0.0f,
          "path"_a = "", "isa"_a = "", "activations"_a = "group", "threshold"_a = 6.0f);
}

}  // namespace headrace
