// The phases a program is made of: each is an op of the vocabulary, or several fused, that all threads run together.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "program_buffers.h"
#include "threadpool.h"

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

// Rows of `table` by id times `scale`, plus rows of `positions` by position.
struct EmbedPhase {
    PackedTensor table;
    std::optional<PackedTensor> positions;
    float scale;
    int out;
};

struct NormPhase {
    NormWeights norm;
    Place in, out;
    int width;
};

// Floats (through a norm, unless its kind is kNone) into the input of a linear layer.
struct QuantizePhase {
    NormWeights norm;
    Place in;
    int out;
};

// kStore and kAdd leave floats at `out`; kGated an input in buffer `out`, or floats where that is a float buffer; kLogits
// the logits of the head in `out` and their block maxima in `maxima`.
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

// The result goes to the float or input buffer of `out`.
struct AttentionPhase {
    int layer;
    AttentionView view;
    Place q, k, v, out;
    NormWeights q_norm, k_norm;  // kNone, or kRms with one eps
    int rope;                    // -1: none
    float scale, softcap;
    std::vector<float> sinks;
};

// Copies the rows out where the step asks for this tap.
struct TapPhase {
    Place in;
    int width;
    int tap;
};

// out = in
struct CopyPhase {
    Place in, out;
    int width;
};

using PhaseWork = std::variant<EmbedPhase, NormPhase, QuantizePhase, LinearPhase, ActPhase, ActMulPhase, ResidualPhase,
                               AttentionPhase, TapPhase, CopyPhase>;

struct Phase {
    PhaseWork work;
    uint8_t sublayer = 0;  // left out when the step skips one of these bits
    std::string name{};    // in profiles
};

class Step;

struct alignas(64) Counter {
    std::atomic<int> value{0};
};

// What the threads of a step have in common.
struct StepRun {
    ThreadPool& pool;
    const Kernels& kernels;
    const std::vector<Buffer>& buffers;
    const std::vector<Rope>& ropes;
    AttentionStep& attention;
    const Step& step;
    Counter counters[3]{};  // of this turn, the last and the next
};

// One thread on its way through a step.
struct Worker {
    StepRun& run;
    int thread;
    uint8_t* scratch;
    int rows = 0;       // of the segment at hand
    unsigned turn = 0;  // barriers passed

    // Waits for the other threads.
    void barrier();
    // 0 when the turn begins, and shared by all threads.
    std::atomic<int>& next() const { return run.counters[turn % 3].value; }
    // f(first, last) for this thread's part of `items`: four fifths are dealt out evenly in order, the rest in turns, so
    // that a thread that lost its CPU for a while does not hold up the others.
    template <class F>
    void share(int items, F f) const;

    const Buffer& buffer(int number) const { return run.buffers[static_cast<size_t>(number)]; }
    float* floats(Place place) const { return buffer(place.buffer).floats() + place.column; }
    int64_t stride(Place place) const { return buffer(place.buffer).stride(); }
};

// Runs a phase, and the barrier after it where one is needed.
void run_phase(const Phase& phase, Worker& worker);

// Bytes of scratch a thread needs for a phase, besides the attention's.
size_t scratch_bytes(const Phase& phase);

template <class F>
void Worker::share(int items, F f) const {
    const int threads = run.pool.size(), part = threads == 1 ? items : items * 4 / 5 / threads, dealt = part * threads;
    if (part > 0) f(thread * part, (thread + 1) * part);
    const int step = std::max(1, (items - dealt) / (8 * threads));
    for (;;) {
        const int first = dealt + next().fetch_add(step, std::memory_order_relaxed);
        if (first >= items) return;
        f(first, std::min(first + step, items));
    }
}

}  // namespace headrace
