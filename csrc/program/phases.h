// The phases of a program. A phase is one recorded op, or several fused ops, that all threads run together.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "attention/attention.h"
#include "linear/linear.h"
#include "program/buffers.h"
#include "program/step.h"
#include "program/turns.h"
#include "ranks/ranks.h"

namespace headrace {

// A norm with its own copy of the weights [width].
struct NormWeights {
    NormKind kind = NormKind::kNone;
    std::vector<float> weight, bias;
    float eps = 0.0f;

    Norm view() const { return {kind, weight.data(), bias.empty() ? nullptr : bias.data(), eps}; }
};

// All activations. Only the first two can be fused into a linear layer (Activation).
enum class ActKind { kSilu, kGeluTanh, kGelu, kRelu, kRelu2 };

// Rotary table: cos and sin of every position, [positions][dim / 2] each.
struct Rope {
    std::vector<float> cos, sin;
    int dim;
    bool interleaved;

    int positions() const { return static_cast<int>(cos.size()) / (dim / 2); }
};

// out = table[id] * scale + offset + [sin, cos] of the position + positions[position]. All but the table are optional.
// With a separator, `second` replaces the offset for the tokens after the first separator of a text.
struct EmbedPhase {
    PackedTensor table;
    std::optional<PackedTensor> positions;
    float scale;
    int out;
    std::vector<float> offset{};  // [width] or empty
    int sinusoids = -1;           // number of a rope; -1: none
    // [ranks + 1], or empty: the table has all rows. The table of rank r has rows [borders[r], borders[r + 1]); it
    // computes the rows of their tokens and receives the others in an exchange.
    std::vector<int32_t> borders{};
    std::vector<float> second{};  // [width] or empty
    int32_t separator = -1;       // token id; -1: none
};

struct NormPhase {
    NormWeights norm;
    Place in, out;
    int width;
};

// Normalizes float rows (unless the norm is kNone) and converts them to the input format of a linear layer (A8 or
// bfloat16). Input column i is float column order[i]; an empty order keeps the columns. `scale` is used with
// Rounding::kTensor only: the scale of all rows, or 0 for one scale per row. `extremes`: the buffer of an ExtremePhase,
// if the rows are parts of longer rows that are scaled as a whole; -1: they are not.
struct QuantizePhase {
    NormWeights norm;
    Place in;
    int out;
    std::vector<int32_t> order{};
    float scale = 0.0f;
    int extremes = -1;
};

// kStore and kAdd write floats to `out`; kStore may write a partial result for a ReducePhase. kGated writes to buffer
// `out` in that buffer's format. kLogits writes the logits to `out` and the maximum of each block of kVocabBlock logits
// to `maxima`. Logits of a part of the vocabulary begin at a multiple of kVocabBlock columns of `out`.
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
    int layer;  // of the pool
    AttentionView view;
    Place q, k, v, out;
    NormWeights q_norm, k_norm;  // kNone, or kRms with one eps
    int rope;                    // number of a rope; -1: none
    float scale, softcap;
    std::vector<float> sinks;
    std::vector<float> k_shift;  // [kv heads * dim] or empty
    std::vector<float> bias{};   // DistanceBias::lines, or empty
    int bias_most = 0;
    int q_rope = -1;  // number of a rope for q, if it is another one
    int pool = 0;     // number of the KV pool
};

// Stores K and V of all rows in the pool and reads nothing. Used for the cross-attention K/V of an encoder-decoder.
struct StorePhase {
    int layer;  // of the pool
    Place k, v;
    int pool = 0;  // number of the KV pool
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

// The matrices of an adapter for a linear layer or a part of it, bfloat16. Source: Hu et al., "LoRA", arXiv 2106.09685.
struct LowRank {
    std::vector<uint16_t> down;  // [rank][in]
    std::vector<uint16_t> up;    // [rank][out], with the adapter's scale
    int rank = 0;                // 0: the adapter leaves this layer unchanged
};

// Columns of a linear layer's output that adapters change, such as q, k or v.
struct AdaptedPart {
    int column, width;
    std::vector<LowRank> adapters;  // that of number n is adapters[n - 1]
    int low = 0, rank = 0;          // first column of down * in in the buffer; the largest rank of the adapters
};

// out += up * (down * in) in each part, for the rows with an adapter (StepRows::adapters); other rows are not touched.
// `low` is the buffer of down * in, the parts side by side. Sums have one order, whatever the other rows are.
struct AdapterPhase {
    std::vector<AdaptedPart> parts;
    Place in, out;
    int in_width, out_width;
    int low;
};

// Exchanges between ranks.
// out = [out +] (sum of all ranks' partial rows + bias). The sums are joined as the eight segments of a linear layer.
struct ReducePhase {
    int partial;  // buffer, kPartial
    Place out;
    int width;
    bool add;
    std::vector<float> bias{};  // [width] or empty
};

// Common buffers: waits until all ranks have written. Other buffers, in a step that splits its rows: receives the rows
// of the other ranks.
struct GatherPhase {
    int buffer;
};

// Writes the largest |x| of each row, over the columns of all ranks, to buffer `out`: one float per row without gaps.
struct ExtremePhase {
    Place in;
    int width;
    int out;
};

using PhaseWork = std::variant<EmbedPhase, NormPhase, QuantizePhase, LinearPhase, ActPhase, ActMulPhase, ResidualPhase,
                               AttentionPhase, StorePhase, TapPhase, CopyPhase, ScatterPhase, ReducePhase, GatherPhase,
                               ExtremePhase, AdapterPhase>;

struct Phase {
    PhaseWork work;
    uint8_t sublayer = 0;  // bits of the sublayers that contain it; skipped if Step::skips has one of them
    std::string name{};    // in profiles
    bool fills = false;    // K and V depend on it, so a fill step (Step::fill) runs it
    bool by_rows = false;  // computes the rank's rows only, if the step splits its rows over the ranks
};

// Layers that share block tables: their KV pool, and the attention of a step over it. Pool 0 is on the tables of
// tokens and sources, pool 1 on those of window layers.
struct KVGroup {
    KVGroup(std::shared_ptr<KVPool> kv, const Kernels& kernels, int threads)
        : pool(std::move(kv)), attention(kernels, *pool, threads) {}

    const std::shared_ptr<KVPool> pool;
    AttentionStep attention;
};
using KVGroups = std::vector<std::unique_ptr<KVGroup>>;

// Shared state of the threads that run a step.
struct StepRun {
    const Kernels& kernels;
    const std::vector<Buffer>& buffers;
    const std::vector<Rope>& ropes;
    const KVGroups& kv;
    const StepRows& rows;
    std::span<float* const> taps;  // Step::taps
    Turns& turns;
    int threads;
    Ranks* ranks;  // or null
    bool splits;   // rows are split over the ranks: rank r has rows [r * rows / ranks, (r + 1) * rows / ranks)
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
    uint32_t exchange = 0;             // number of the next exchange
    int first_row = 0, last_row = 0;   // rows of the current phase
    FetchList fetch{};                 // memory that the next linear layer prefetches besides its weights
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
    // `share` of the rows of the current phase.
    template <class F>
    void share_rows(F f) {
        share(last_row - first_row, [&](int first, int last) { f(first_row + first, first_row + last); });
    }
    // Arrives at the next exchange and waits for the other ranks; for items of the exchange's turn. Returns false if a
    // rank is lost.
    bool meet() {
        run.ranks->arrive(exchange);
        return run.ranks->await(exchange);
    }
    // The first of the current segment's rows that belongs to a rank, if the step splits them.
    int first_row_of(int rank) const { return static_cast<int>(int64_t{rows} * rank / run.ranks->world()); }

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

// Receives the rows of the other ranks in a buffer, in two turns.
void gather_rows(const Buffer& buffer, Worker& worker);

// Runs this thread's part of the phase of a layer's adapters (adapters.cpp).
void run_adapters(const AdapterPhase& phase, Worker& worker);

// Runs this thread's part of a phase; returns when all threads' parts are done.
void run_phase(const Phase& phase, Worker& worker);
// Maximum number of turns that a phase takes.
int turns_of(const Phase& phase);

// Bytes of scratch that a thread needs for a phase. Attention: see AttentionStep::scratch_floats.
size_t scratch_bytes(const Phase& phase);

}  // namespace headrace
