// The phases a program is made of: each is an op of the vocabulary, or several fused, that all threads run together.
#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "attention/attention.h"
#include "linear/linear.h"
#include "program/buffers.h"
#include "program/turns.h"

namespace headrace {

// A norm that owns its weights.
struct NormWeights {
    NormKind kind = NormKind::kNone;
    std::vector<float> weight, bias;
    float eps = 0.0f;

    Norm view() const { return {kind, weight.data(), bias.empty() ? nullptr : bias.data(), eps}; }
};

// Every activation of the vocabulary; the first two are also epilogues of linear layers.
enum class ActKind { kSilu, kGeluTanh, kGelu, kRelu };

// cos and sin of every position [positions][dim / 2].
struct Rope {
    std::vector<float> cos, sin;
    int dim;
    bool interleaved;

    int positions() const { return static_cast<int>(cos.size()) / (dim / 2); }
};

// Rows of `table` by id times `scale`, plus `offset`, plus rows of `positions` by position, plus the sines and then the
// cosines of a rope at the position.
struct EmbedPhase {
    PackedTensor table;
    std::optional<PackedTensor> positions;
    float scale;
    int out;
    std::vector<float> offset{};  // [width] or empty
    int sinusoids = -1;           // a rope; -1: none
};

struct NormPhase {
    NormWeights norm;
    Place in, out;
    int width;
};

// Floats (through a norm, unless its kind is kNone) into the input of a linear layer, whose column i is column order[i]
// of the floats; empty: as they stand. `scale`: of all rows, where inputs are rounded by such (kTensor); 0: a row's
// own.
struct QuantizePhase {
    NormWeights norm;
    Place in;
    int out;
    std::vector<int32_t> order{};
    float scale = 0.0f;
};

// kStore and kAdd leave floats at `out`; kGated an input in buffer `out`, or floats where that is a float buffer;
// kLogits the logits of the head in `out` and their block maxima in `maxima`.
struct LinearPhase {
    PackedLinear linear;
    int in;
    EpilogueKind kind;
    Place out;
    Activation act = Activation::kSilu;
    float scale = 1.0f, softcap = 0.0f;
    int maxima = -1;
};

struct ActPhase {
    ActKind kind;
    Place in, out;
    int width;
};

// act(gate) * up, of [gate | up] side by side.
struct ActMulPhase {
    ActKind kind;
    Place in, out;
    int width;  // of each
};

// out = x + norm(y); out may be x.
struct ResidualPhase {
    NormWeights post_norm;
    Place x, y, out;
    int width;
};

// The result goes to the float or input buffer of `out`. Rows that read a source, or what an
// earlier layer stored, have no k and v.
struct AttentionPhase {
    int layer;
    AttentionView view;
    Place q, k, v, out;
    NormWeights q_norm, k_norm;  // kNone, or kRms with one eps
    int rope;                    // -1: none
    float scale, softcap;
    std::vector<float> sinks;
    std::vector<float> k_shift;  // [kv heads * dim] or empty
    std::vector<float> bias{};   // as DistanceBias has it, or empty
    int bias_most = 0;
};

// K and V of all rows into the pool, nothing read: what a layer's rows will read as their source.
struct StorePhase {
    int layer;
    Place k, v;
};

// Copies the rows out where the step asks for this tap.
struct TapPhase {
    Place in;
    int width;
    int tap;
};

// Logits of some tokens (ids ascending) to their places among all of the vocabulary, -inf elsewhere, and the block
// maxima.
struct ScatterPhase {
    int in, out, maxima;  // buffers
    std::vector<int32_t> ids;
    int vocab_size;
};

// out = in
struct CopyPhase {
    Place in, out;
    int width;
};

using PhaseWork = std::variant<EmbedPhase, NormPhase, QuantizePhase, LinearPhase, ActPhase, ActMulPhase, ResidualPhase,
                               AttentionPhase, StorePhase, TapPhase, CopyPhase, ScatterPhase>;

struct Phase {
    PhaseWork work;
    uint8_t sublayer = 0;  // left out when the step skips one of these bits
    std::string name{};    // in profiles
    bool fills = false;    // K and V need it: run by a step that only stores them
};

class Step;

// What the threads of a step have in common.
struct StepRun {
    const Kernels& kernels;
    const std::vector<Buffer>& buffers;
    const std::vector<Rope>& ropes;
    AttentionStep& attention;
    const Step& step;
    Turns& turns;
    int threads;
};

// One thread on its way through a step. All threads come by the same turns in the same order.
struct Worker {
    StepRun& run;
    int thread;
    uint8_t* scratch;
    std::vector<const QuantizePhase*>&
        pending_input;  // [buffers] inputs to be made by this thread before it uses them, or null
    int rows = 0;       // of the segment at hand
    int turn = 0;
    FetchList fetch{};                 // for linear layers to fetch
    std::span<const int32_t> units{};  // of the head that are wanted, where not all are
    double* busy = nullptr;            // where a profile wants the seconds in which this thread had work

    // f(first, last) for this thread's share of `items`. What was shared before is done.
    template <class F>
    void share(int items, F f, int grain = 1) {
        run.turns.at(turn++).share(items, thread, [&](int first, int last) { timed([&] { f(first, last); }); }, grain);
    }
    // f(item, next) where items differ much.
    template <class F>
    void deal(int items, F f) {
        run.turns.at(turn++).deal(items, thread, [&](int item, int next) { timed([&] { f(item, next); }); });
    }
    template <class F>
    void timed(F f) {
        if (!busy) return f();
        const auto start = std::chrono::steady_clock::now();
        f();
        *busy += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }

    const Buffer& buffer(int number) const { return run.buffers[static_cast<size_t>(number)]; }
    float* floats(Place place) const { return buffer(place.buffer).floats() + place.column; }
    int64_t stride(Place place) const { return buffer(place.buffer).stride(); }
};

// This thread's part of a phase; returns when the phase is done.
void run_phase(const Phase& phase, Worker& worker);
// The most turns a phase takes.
int turns_of(const Phase& phase);

// Bytes of scratch a thread needs for a phase, besides the attention's.
size_t scratch_bytes(const Phase& phase);

}  // namespace headrace
