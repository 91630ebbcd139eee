// The phases of a program. A phase is one recorded op, or several fused ops, that all threads run together.
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
#include "program/step.h"
#include "program/turns.h"

namespace headrace {

// A norm with its own copy of the weights [width].
struct NormWeights {
    NormKind kind = NormKind::kNone;
    std::vector<float> weight, bias;
    float eps = 0.0f;

    Norm view() const { return {kind, weight.data(), bias.empty() ? nullptr : bias.data(), eps}; }
};

// All activations. Only the first two can be fused into a linear layer (Activation).
enum class ActKind { kSilu, kGeluTanh, kGelu, kRelu };

// Rotary table: cos and sin of every position, [positions][dim / 2] each.
struct Rope {
    std::vector<float> cos, sin;
    int dim;
    bool interleaved;

    int positions() const { return static_cast<int>(cos.size()) / (dim / 2); }
};

// out = table[id] * scale + offset + [sin, cos] of the position + positions[position]. All but the table are optional.
struct EmbedPhase {
    PackedTensor table;
    std::optional<PackedTensor> positions;
    float scale;
    int out;
    std::vector<float> offset{};  // [width] or empty
    int sinusoids = -1;           // number of a rope; -1: none
};

struct NormPhase {
    NormWeights norm;
    Place in, out;
    int width;
};

// Normalizes float rows (unless the norm is kNone) and converts them to the input format of a linear layer (A8 or
// bfloat16). Input column i is float column order[i]; an empty order keeps the columns. `scale` is used with
// Rounding::kTensor only: the scale of all rows, or 0 for one scale per row.
struct QuantizePhase {
    NormWeights norm;
    Place in;
    int out;
    std::vector<int32_t> order{};
    float scale = 0.0f;
};

// kStore and kAdd write floats to `out`. kGated writes to buffer `out` in that buffer's format. kLogits writes the
// logits to `out` and the maximum of each block of kVocabBlock logits to `maxima`.
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

// out = act(gate) * up. The input row is [gate | up], each `width` columns.
struct ActMulPhase {
    ActKind kind;
    Place in, out;
    int width;
};

// out = x + norm(y); out may be x.
struct ResidualPhase {
    NormWeights post_norm;
    Place x, y, out;
    int width;
};

// Attention of one layer; the result is written in the format of the buffer of `out`. `k` and `v` are unused if the
// rows read the K/V of a source or of an earlier layer (AttentionView::stores).
struct AttentionPhase {
    int layer;
    AttentionView view;
    Place q, k, v, out;
    NormWeights q_norm, k_norm;  // kNone, or kRms with one eps
    int rope;                    // number of a rope; -1: none
    float scale, softcap;
    std::vector<float> sinks;
    std::vector<float> k_shift;  // [kv heads * dim] or empty
    std::vector<float> bias{};   // DistanceBias::lines, or empty
    int bias_most = 0;
};

// Stores K and V of all rows in the pool and reads nothing. Used for the cross-attention K/V of an encoder-decoder.
struct StorePhase {
    int layer;
    Place k, v;
};

// Copies the rows to Step::taps[tap], if that is set.
struct TapPhase {
    Place in;
    int width;
    int tap;
};

// Expands the logits of a reduced vocabulary: out[ids[i]] = in[i], -inf elsewhere, and computes the block maxima. `ids`
// is ascending.
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
    uint8_t sublayer = 0;  // bits of the sublayers that contain it; skipped if Step::skips has one of them
    std::string name{};    // in profiles
    bool fills = false;    // K and V depend on it, so a fill step (Step::fill) runs it
};

// Shared state of the threads that run a step.
struct StepRun {
    const Kernels& kernels;
    const std::vector<Buffer>& buffers;
    const std::vector<Rope>& ropes;
    AttentionStep& attention;
    const StepRows& rows;
    std::span<float* const> taps;  // Step::taps
    Turns& turns;
    int threads;
};

// State of one thread in a step. All threads pass the same turns in the same order.
struct Worker {
    StepRun& run;
    int thread;
    uint8_t* scratch;
    std::vector<const QuantizePhase*>&
        pending_input;  // [buffers] the local input that this thread must compute before it reads the buffer, or null
    int rows = 0;       // rows of the current segment
    int turn = 0;       // number of the next turn
    FetchList fetch{};  // memory that the next linear layer prefetches besides its weights
    std::span<const int32_t> units{};  // blocks of the head to compute; empty: all
    double* busy = nullptr;            // profiling: the seconds in which this thread ran items are added here

    // Turn::share of the next turn. All earlier turns are done.
    template <class F>
    void share(int items, F f, int grain = 1) {
        run.turns.at(turn++).share(items, thread, [&](int first, int last) { timed([&] { f(first, last); }); }, grain);
    }
    // Turn::deal of the next turn.
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

// Runs this thread's part of a phase; returns when all threads' parts are done.
void run_phase(const Phase& phase, Worker& worker);
// Maximum number of turns that a phase takes.
int turns_of(const Phase& phase);

// Bytes of scratch that a thread needs for a phase. Attention: see AttentionStep::scratch_floats.
size_t scratch_bytes(const Phase& phase);

}  // namespace headrace
