// Python bindings of programs: building a program phase by phase, and running steps.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/bound_weights.h"
#include "program/program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using FloatTable = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutTable = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using At = std::pair<int, int>;  // buffer, column
using Pairs = std::vector<std::pair<int32_t, int32_t>>;

template <class T, size_t n>
T choose(const std::string& name, const std::pair<const char*, T> (&choices)[n]) {
    for (const auto& [each, value] : choices) {
        if (name == each) return value;
    }
    std::string known;
    for (const auto& [each, value] : choices) known += (known.empty() ? "" : ", ") + std::string(each);
    throw nb::value_error(("unknown name '" + name + "'; use one of " + known).c_str());
}

Place place(At at) { return {at.first, at.second}; }

BufferKind buffer_kind(const std::string& name) {
    return choose<BufferKind>(name, {{"float", BufferKind::kFloat},
                                     {"a8", BufferKind::kA8},
                                     {"bf16", BufferKind::kBf16},
                                     {"partial", BufferKind::kPartial}});
}

EpilogueKind epilogue_kind(const std::string& name) {
    return choose<EpilogueKind>(name, {{"store", EpilogueKind::kStore},
                                       {"add", EpilogueKind::kAdd},
                                       {"gated", EpilogueKind::kGated},
                                       {"logits", EpilogueKind::kLogits}});
}

ActKind act_kind(const std::string& name) {
    return choose<ActKind>(name, {{"silu", ActKind::kSilu},
                                  {"gelu_tanh", ActKind::kGeluTanh},
                                  {"gelu", ActKind::kGelu},
                                  {"relu", ActKind::kRelu},
                                  {"relu2", ActKind::kRelu2}});
}

std::vector<float> copied(const std::optional<FloatVector>& x) {
    return x ? std::vector<float>(x->data(), x->data() + x->size()) : std::vector<float>();
}

NormWeights norm_of(const NormWeights* norm) { return norm ? *norm : NormWeights{}; }

void begin(Program& program, const std::string& segment) {
    require(segment == "embed" || segment == "layer" || segment == "head",
            "a segment is embed, layer or head, not " + segment);
    program.begin(segment == "embed"   ? SegmentKind::kEmbed
                  : segment == "layer" ? SegmentKind::kLayer
                                       : SegmentKind::kHead);
}

int add_rope(Program& program, const std::vector<double>& frequencies, int positions, bool interleaved,
             double amplitude, double growth, int length) {
    require(positions > 0 && length > 0, "a rope has at least one position, and a length of at least one");
    const nb::gil_scoped_release unlocked;
    return program.add_rope(frequencies, positions, interleaved, amplitude, growth, length);
}

void add_linear(Program& program, const BoundLinear& linear, int in, const std::string& kind, At out,
                const std::string& act, float scale, float softcap, int maxima, uint8_t sublayer,
                const std::string& name, bool fills) {
    for (const BoundTensor& tensor : linear.tensors) program.keep(tensor.arena);
    const Activation activation =
        choose<Activation>(act, {{"silu", Activation::kSilu}, {"gelu_tanh", Activation::kGeluTanh}});
    program.add({LinearPhase{linear.packed, in, epilogue_kind(kind), place(out), activation, scale, softcap, maxima},
                 sublayer, name, fills});
}

void add_embed(Program& program, const BoundTensor& table, int out, float scale, const BoundTensor* positions,
               const std::optional<FloatVector>& offset, int sinusoids, const std::vector<int32_t>& borders,
               const std::optional<FloatVector>& second, int32_t separator, const std::string& name) {
    require((separator >= 0) == second.has_value(), "a separator comes with the second type, and without one");
    program.keep(table.arena);
    if (positions) program.keep(positions->arena);
    program.add({EmbedPhase{table.packed, positions ? std::optional(positions->packed) : std::nullopt, scale, out,
                            copied(offset), sinusoids, borders, copied(second), separator},
                 0, name});
}

// A part's first column and width, and one (down, up) or None for each adapter, by number.
using LowRankArrays = std::pair<Bfloats, Bfloats>;
using AdaptedArrays = std::tuple<int, int, std::vector<std::optional<LowRankArrays>>>;

void add_adapter(Program& program, At in, int in_width, At out, int out_width, int low,
                 const std::vector<AdaptedArrays>& parts, uint8_t sublayer, const std::string& name, bool fills) {
    AdapterPhase phase{{}, place(in), place(out), in_width, out_width, low};
    int ranks = 0;
    for (const auto& [column, width, adapters] : parts) {
        AdaptedPart& part = phase.parts.emplace_back(AdaptedPart{column, width, {}, ranks});
        for (const auto& each : adapters) {
            LowRank& adapter = part.adapters.emplace_back();
            if (!each) continue;
            const auto& [down, up] = *each;
            require(down.shape(0) == up.shape(0), "down and up are [rank, in] and [rank, out]");
            adapter.rank = static_cast<int>(down.shape(0));
            adapter.down.assign(down.data(), down.data() + down.size());
            adapter.up.assign(up.data(), up.data() + up.size());
            part.rank = std::max(part.rank, adapter.rank);
        }
        ranks += part.rank;
    }
    program.add({std::move(phase), sublayer, name, fills});
}

// `k` and `v` are None for rows that read the K/V of a source or of an earlier layer.
void add_attention(Program& program, int layer, int heads, At q, std::optional<At> k, std::optional<At> v, At out,
                   float scale, int rope, const NormWeights* q_norm, const NormWeights* k_norm, int window,
                   float softcap, const std::optional<FloatVector>& sinks, bool causal,
                   const std::optional<FloatVector>& k_shift, bool source, const std::optional<FloatTable>& bias,
                   int group, int skipped, int q_rope, int pool, uint8_t sublayer, const std::string& name,
                   bool fills) {
    require(k.has_value() == v.has_value() && !(source && k), "rows have K and V, or read a source or another layer's");
    const BiasLines lines = bias ? bias_lines(bias->data(), bias->shape(0), bias->shape(1)) : BiasLines{};
    program.add({AttentionPhase{layer,
                                {heads, window, causal, source, bias.has_value(), !source && !k, group, skipped},
                                place(q),
                                k ? place(*k) : Place{},
                                v ? place(*v) : Place{},
                                place(out),
                                norm_of(q_norm),
                                norm_of(k_norm),
                                rope,
                                scale,
                                softcap,
                                copied(sinks),
                                copied(k_shift),
                                lines.values,
                                lines.most,
                                q_rope,
                                pool},
                 sublayer, name, fills});
}

void run(Program& program, Step& step, std::pair<int, int> layers, const std::optional<FloatTable>& hidden,
         const std::optional<OutTable>& hidden_out, const std::vector<uint8_t>& skips,
         const std::vector<std::pair<int, OutTable>>& taps, bool fill) {
    const Exclusive mine(step.in_use);
    const auto fits = [&](size_t rows, size_t width) {
        return rows == static_cast<size_t>(step.rows()) && width == static_cast<size_t>(program.hidden());
    };
    require(!hidden || fits(hidden->shape(0), hidden->shape(1)), "hidden must be [rows, hidden size]");
    require(!hidden_out || fits(hidden_out->shape(0), hidden_out->shape(1)), "hidden_out must be [rows, hidden size]");
    step.first_layer = layers.first;
    step.last_layer = layers.second;
    step.hidden = hidden ? hidden->data() : nullptr;
    step.hidden_out = hidden_out ? hidden_out->data() : nullptr;
    step.skips = skips;
    step.fill = fill;
    step.taps.clear();
    for (const auto& [tap, out] : taps) {
        require(tap >= 0 && tap < program.taps(), "no such tap");
        require(fits(out.shape(0), out.shape(1)), "a tap's rows must be [rows, hidden size]");
        if (step.taps.size() <= static_cast<size_t>(tap)) step.taps.resize(static_cast<size_t>(tap) + 1);
        step.taps[static_cast<size_t>(tap)] = out.data();
    }
    const nb::gil_scoped_release unlocked;
    program.run(step);
}

nb::list profile(const Program& program) {
    nb::list entries;
    for (const auto& [key, entry] : program.profile()) {
        const auto& [rows, name, kernel] = key;
        nb::dict line;
        line["step_rows"] = rows;
        line["phase"] = name;
        line["kernel"] = kernel;
        line["calls"] = entry.calls;
        line["seconds"] = entry.seconds;
        line["idle"] = entry.idle;
        line["weight_bytes"] = entry.weights;
        line["row_bytes"] = entry.rows;
        line["macs"] = entry.macs;
        line["products"] = products_name(entry.products);
        entries.append(line);
    }
    return entries;
}

void bind_building(nb::class_<Program>& c) {
    c.def(
         "buffer",
         [](Program& self, const std::string& kind, int width, bool local, bool shared) {
             require(!shared || (kind == "float" && !local), "ranks share float buffers only");
             return shared ? self.add_common_buffer(width) : self.add_buffer(buffer_kind(kind), width, local);
         },
         "kind"_a, "width"_a, "local"_a = false, "shared"_a = false,
         "Add a buffer and return its number. partial: rows that the next `reduce` sums over the ranks. shared: logits "
         "or maxima that all ranks write.")
        .def("rope", &add_rope, "frequencies"_a, "positions"_a, "interleaved"_a, "amplitude"_a = 1.0, "growth"_a = 0.0,
             "length"_a = 1,
             "Radians a position [dim / 2] -> number. Values are multiplied by amplitude * (1 + growth * ln(1 + "
             "position "
             "/ length)), where the quotient is an integer.")
        .def("tap", &Program::add_tap)
        .def("begin", &begin, "segment"_a, "What is added from now on belongs to embed, to a new layer, or to head.")
        .def("embed", &add_embed, "table"_a, "out"_a, "scale"_a = 1.0f, "positions"_a.none() = nb::none(),
             "offset"_a = nb::none(), "sinusoids"_a = -1, "borders"_a = std::vector<int32_t>{}, "second"_a = nb::none(),
             "separator"_a = -1, "name"_a = "",
             "sinusoids: a rope whose sines and then cosines of the position are added, or -1. borders: ids between "
             "which each rank has the rows of the table. second: replaces offset after a text's first separator.")
        .def("adapter", &add_adapter, "source"_a, "width"_a, "out"_a, "out_width"_a, "low"_a, "parts"_a,
             "sublayer"_a = 0, "name"_a = "", "fills"_a = false,
             "out += up (down x) for rows of sequences with an adapter. parts: (column, width, adapters) of each part "
             "of the output, adapters by number: (down [rank, in], up [rank, width]) as the bits of bfloat16, or None. "
             "low: a float buffer as wide as the largest rank of each part together.")
        .def(
            "norm",
            [](Program& self, At in, At out, int width, const NormWeights& norm, uint8_t sublayer,
               const std::string& name, bool fills, bool by_rows) {
                self.add({NormPhase{norm, place(in), place(out), width}, sublayer, name, fills, by_rows});
            },
            "source"_a, "out"_a, "width"_a, "norm"_a, "sublayer"_a = 0, "name"_a = "", "fills"_a = false,
            "by_rows"_a = false)
        .def(
            "quantize",
            [](Program& self, At in, int out, const NormWeights* norm, const std::vector<int32_t>& order, float scale,
               int extremes, uint8_t sublayer, const std::string& name, bool fills, bool by_rows) {
                self.add({QuantizePhase{norm_of(norm), place(in), out, order, scale, extremes}, sublayer, name, fills,
                          by_rows});
            },
            "source"_a, "out"_a, "norm"_a.none() = nb::none(), "order"_a = std::vector<int32_t>{}, "scale"_a = 0.0f,
            "extremes"_a = -1, "sublayer"_a = 0, "name"_a = "", "fills"_a = false, "by_rows"_a = false,
            "Convert float rows to a linear layer's input; input column i is float column order[i]. extremes: buffer "
            "that `extreme` filled, or -1.")
        .def("linear", &add_linear, "linear"_a, "source"_a, "kind"_a, "out"_a, "act"_a = "silu", "scale"_a = 1.0f,
             "softcap"_a = 0.0f, "maxima"_a = -1, "sublayer"_a = 0, "name"_a = "", "fills"_a = false)
        .def(
            "act",
            [](Program& self, const std::string& kind, At in, At out, int width, uint8_t sublayer,
               const std::string& name, bool fills) {
                self.add({ActPhase{act_kind(kind), place(in), place(out), width}, sublayer, name, fills});
            },
            "kind"_a, "source"_a, "out"_a, "width"_a, "sublayer"_a = 0, "name"_a = "", "fills"_a = false)
        .def(
            "act_mul",
            [](Program& self, const std::string& kind, At in, At out, int width, uint8_t sublayer,
               const std::string& name, bool fills) {
                self.add({ActMulPhase{act_kind(kind), place(in), place(out), width}, sublayer, name, fills});
            },
            "kind"_a, "source"_a, "out"_a, "width"_a, "sublayer"_a = 0, "name"_a = "", "fills"_a = false)
        .def(
            "residual",
            [](Program& self, At x, At y, At out, int width, const NormWeights* post_norm, uint8_t sublayer,
               const std::string& name, bool fills, bool by_rows) {
                self.add({ResidualPhase{norm_of(post_norm), place(x), place(y), place(out), width}, sublayer, name,
                          fills, by_rows});
            },
            "x"_a, "y"_a, "out"_a, "width"_a, "post_norm"_a.none() = nb::none(), "sublayer"_a = 0, "name"_a = "",
            "fills"_a = false, "by_rows"_a = false)
        .def(
            "copy",
            [](Program& self, At in, At out, int width, uint8_t sublayer, const std::string& name, bool fills,
               bool by_rows) { self.add({CopyPhase{place(in), place(out), width}, sublayer, name, fills, by_rows}); },
            "source"_a, "out"_a, "width"_a, "sublayer"_a = 0, "name"_a = "", "fills"_a = false, "by_rows"_a = false)
        .def(
            "reduce",
            [](Program& self, int partial, At out, int width, bool add, const std::optional<FloatVector>& bias,
               uint8_t sublayer, const std::string& name, bool fills, bool by_rows) {
                self.add({ReducePhase{partial, place(out), width, add, copied(bias)}, sublayer, name, fills, by_rows});
            },
            "partial"_a, "out"_a, "width"_a, "add"_a = false, "bias"_a = nb::none(), "sublayer"_a = 0, "name"_a = "",
            "fills"_a = false, "by_rows"_a = false, "out = [out +] (sum of the ranks' partial rows + bias).")
        .def(
            "gather",
            [](Program& self, int buffer, uint8_t sublayer, const std::string& name, bool fills) {
                self.add({GatherPhase{buffer}, sublayer, name, fills});
            },
            "buffer"_a, "sublayer"_a = 0, "name"_a = "", "fills"_a = false,
            "Shared buffers: wait until all ranks have written. Others, in steps that split their rows: receive the "
            "rows of the other ranks.")
        .def(
            "extreme",
            [](Program& self, At in, int out, int width, uint8_t sublayer, const std::string& name, bool fills) {
                self.add({ExtremePhase{place(in), width, out}, sublayer, name, fills});
            },
            "source"_a, "out"_a, "width"_a, "sublayer"_a = 0, "name"_a = "", "fills"_a = false,
            "Write the largest |x| of each row, over the columns of all ranks, to a float buffer.")
        .def(
            "scatter",
            [](Program& self, int in, int out, int maxima, const std::vector<int32_t>& ids, int vocab_size,
               const std::string& name) { self.add({ScatterPhase{in, out, maxima, ids, vocab_size}, 0, name}); },
            "source"_a, "out"_a, "maxima"_a, "ids"_a, "vocab_size"_a, "name"_a = "",
            "Logits of the tokens `ids` (ascending) to their places among all; the others are -inf.")
        .def(
            "copy_to_tap",
            [](Program& self, At in, int tap, const std::string& name) {
                self.add({TapPhase{place(in), self.hidden(), tap}, 0, name});
            },
            "source"_a, "tap"_a, "name"_a = "")
        .def(
            "attention", &add_attention, "layer"_a, "heads"_a, "q"_a, "k"_a.none(), "v"_a.none(), "out"_a, "scale"_a,
            "rope"_a = -1, "q_norm"_a.none() = nb::none(), "k_norm"_a.none() = nb::none(), "window"_a = 0,
            "softcap"_a = 0.0f, "sinks"_a = nb::none(), "causal"_a = true, "k_shift"_a = nb::none(), "source"_a = false,
            "bias"_a = nb::none(), "group"_a = 0, "skipped"_a = 0, "q_rope"_a = -1, "pool"_a = 0, "sublayer"_a = 0,
            "name"_a = "", "fills"_a = false,
            "source: rows read all of their feed's source, without K and V of their own. bias [heads, 2 d + 1]: what a "
            "distance (key - row) from -d to d adds to a score before it is scaled; what is farther is as far as d. "
            "group: "
            "query heads per KV head; the first `skipped` ones of the first KV head belong to the rank before. q_rope: "
            "rope of q, if it is not that of k. pool: number of the KV pool, 1 for that of window layers.")
        .def(
            "store",
            [](Program& self, int layer, At k, At v, int pool, uint8_t sublayer, const std::string& name, bool fills) {
                self.add({StorePhase{layer, place(k), place(v), pool}, sublayer, name, fills});
            },
            "layer"_a, "k"_a, "v"_a, "pool"_a = 0, "sublayer"_a = 0, "name"_a = "", "fills"_a = false,
            "K and V into the pool; nothing is read.");
}

}  // namespace

void bind_program(nb::module_& m) {
    nb::class_<NormWeights>(m, "NormWeights")
        .def(
            "__init__",
            [](NormWeights* self, const std::string& kind, const FloatVector& weight,
               const std::optional<FloatVector>& bias, float eps) {
                const NormKind norm = choose<NormKind>(kind, {{"rms", NormKind::kRms}, {"layer", NormKind::kLayer}});
                require(!bias || bias->size() == weight.size(), "a norm has as many biases as weights");
                new (self) NormWeights{norm, copied(weight), copied(bias), eps};
            },
            "kind"_a, "weight"_a, "bias"_a = nb::none(), "eps"_a);
    nb::class_<Streaming>(m, "Streaming", "Weights that stay in a file while a program runs.")
        .def_prop_ro(
            "stats",
            [](const Streaming& self) {
                const Streaming::Stats stats = self.stats();
                nb::dict made;
                made["fetched"] = stats.fetched;
                made["reading"] = stats.reading;
                made["missed"] = stats.missed;
                made["waited"] = stats.waited;
                return made;
            },
            "Bytes read and their seconds, units reached while another was read, seconds that steps waited.");
    nb::class_<Program> program(m, "Program",
                                "A model as phases that all threads run together: one call for each step.");
    program
        .def(
            "__init__",
            [](Program* self, std::shared_ptr<ThreadPool> pool, std::shared_ptr<KVPool> kv, int hidden, int vocab_size,
               const std::string& isa, const std::string& activations, float threshold, std::shared_ptr<Ranks> ranks,
               int number, std::shared_ptr<KVPool> windows) {
                new (self)
                    Program(std::move(pool), std::move(kv), kernels_named(isa), hidden, vocab_size,
                            rounding_named(activations), threshold, std::move(ranks), number, std::move(windows));
            },
            "pool"_a, "kv"_a, "hidden"_a, "vocab_size"_a, "isa"_a = "", "activations"_a = "group", "threshold"_a = 6.0f,
            "ranks"_a.none() = nb::none(), "number"_a = 0, "windows"_a.none() = nb::none(),
            "windows: pool of the layers with a window, which are on table 2 of the sequences.")
        .def("split_from", &Program::split_from, "rows"_a,
             "Steps of at least this number of rows, and without taps, split them over the ranks; 0: no step does.")
        .def(
            "move", [](Program& self, const Pairs& pairs, int pool) { self.move(pairs, pool); }, "pairs"_a,
            "pool"_a = 0, nb::call_guard<nb::gil_scoped_release>(), "KVPool.move on every rank.")
        .def(
            "copy_blocks", [](Program& self, const Pairs& pairs, int pool) { self.copy_blocks(pairs, pool); },
            "pairs"_a, "pool"_a = 0, nb::call_guard<nb::gil_scoped_release>(), "KVPool.copy_blocks on every rank.")
        .def("run", &run, "step"_a, "layers"_a = std::pair(0, -1), "hidden"_a = nb::none(),
             "hidden_out"_a.noconvert() = nb::none(), "skips"_a = std::vector<uint8_t>{},
             "taps"_a.noconvert() = std::vector<std::pair<int, OutTable>>{}, "fill"_a = false,
             "Carry out a step: layers [first, last) (-1: to the end), from its ids or from `hidden`. fill: of these "
             "layers K and V alone, of `hidden` as it is.")
        .def(
            "weight_units",
            [](const Program& self) {
                std::vector<int64_t> sizes;
                for (const Streaming::Unit& unit : self.weight_units()) {
                    sizes.push_back(0);
                    for (const auto& part : unit) sizes.back() += static_cast<int64_t>(part.size());
                }
                return sizes;
            },
            "Bytes of the packed weights of each unit: embed (0 if the head multiplies its table), each layer, the "
            "head.")
        .def(
            "stream",
            [](Program& self, std::shared_ptr<Arena> arena, const std::vector<bool>& held, int ahead, bool release) {
                require(arena->in_file(), "weights are streamed from an arena in a file");
                const auto units = self.weight_units();
                require(held.size() == units.size(), "held has a value for each unit");
                auto streaming = std::make_shared<Streaming>(std::move(arena), units, held, ahead, release);
                self.stream(streaming);
                return streaming;
            },
            "arena"_a, "held"_a, "ahead"_a = 1, "release"_a = true, nb::call_guard<nb::gil_scoped_release>(),
            "Read the held units into memory, and all others while steps run: units are those of `weight_units`. Tests "
            "pass `ahead` and `release`; see program/streaming.h.")
        .def_rw("profiling", &Program::profiling)
        .def_prop_ro("profile", &profile,
                     "What the steps since then took, a dict for each phase; see program/profile.h.")
        .def("clear_profile", &Program::clear_profile)
        .def("seal", &Program::seal,
             "Look at the whole description, once: ValueError for what cannot be, with the phase. Nothing can be added "
             "after that. The first step does it where nobody did.")
        .def_prop_ro("layers", &Program::layers)
        .def_prop_ro("threads", &Program::threads);
    bind_building(program);
}

}  // namespace headrace
