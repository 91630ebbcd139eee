// A model as a list of phases. All threads of a pool run each phase together; one call runs one step.
//
// A program is built once, phase by phase, in segments: embed, one per layer, head. Values are rows in buffers. A step
// runs embed or starts from given hidden rows, runs a range of layers, and runs the head on selected rows. The result
// of a row depends on that row alone, not on the threads or on the other rows of the step.
#pragma once

#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "program/commands.h"
#include "program/needs.h"
#include "program/phases.h"
#include "program/profile.h"
#include "program/step.h"
#include "program/streaming.h"
#include "system/in_use.h"
#include "system/threadpool.h"

namespace headrace {

class Program {
public:
    static constexpr int kMostHeadRows = 80;  // rows of logits in memory at once; more than a draft tree has

    // `hidden`: width of the hidden rows. Buffer 0 holds the hidden rows of the step, buffer 1 those of the head.
    // `rounding`, `threshold`: quantization of the inputs of integer layers, see A8.
    // `ranks`: the program holds this rank's share of the model; it is program `number` of each rank.
    Program(std::shared_ptr<ThreadPool> pool, std::shared_ptr<KVPool> kv, const Kernels& kernels, int hidden,
            int vocab_size, Rounding rounding = Rounding::kGroup, float threshold = 0.0f,
            std::shared_ptr<Ranks> ranks = nullptr, int number = 0, std::shared_ptr<KVPool> windows = nullptr);

    // Building. `seal` checks the whole description and throws std::invalid_argument that names the phase; the first
    // `run` seals a program that its builder did not. Nothing can be added to a sealed program.
    int add_buffer(BufferKind kind, int width, bool local = false);
    // A float buffer of head rows that all ranks write.
    int add_common_buffer(int width);
    int add_rope(Rope rope);
    // Pair i rotates by frequencies[i] radians per position, times amplitude * (1 + growth * ln(1 + position /
    // length)), where the quotient is an integer. Angles, cos and sin are computed in float64.
    int add_rope(const std::vector<double>& frequencies, int positions, bool interleaved, double amplitude = 1.0,
                 double growth = 0.0, int length = 1);
    int add_tap();
    int taps() const { return taps_; }
    // Keeps `owner`, for example the arena of the weights, alive as long as the program.
    void keep(std::shared_ptr<const void> owner) { owners_.push_back(std::move(owner)); }
    void begin(SegmentKind kind);  // starts a segment; kLayer adds a layer
    void add(Phase phase);
    void seal();

    // Steps of at least this number of rows, and without taps, split them over the ranks (Phase::by_rows); 0: no step
    // does. Throws std::invalid_argument for so few rows that an input may be local (Buffer::is_local).
    void split_from(int rows);

    // Packed weights by unit (Streaming::Unit): embed without a table that the head multiplies, each layer, the head.
    std::vector<Streaming::Unit> weight_units() const;
    // Steps read the weights through `streaming`, whose units are `weight_units`; null: they are in memory.
    void stream(std::shared_ptr<Streaming> streaming);

    // Runs a step and fills its answers. Locks the program, its KV pool and the sequences; the caller locks the step.
    // Throws, before anything is computed: std::runtime_error if another thread uses one of these, std::out_of_range or
    // std::invalid_argument for a step that does not fit the program, ForkedError after a fork. Of several
    // ranks, the first runs the step and the others receive it. Throws RankLost if one of them is lost.
    void run(Step& step);
    // KVPool::move and copy_blocks, on every rank. Throw as they do, or RankLost.
    void move(KVPool::Pairs pairs, int pool = 0);
    void copy_blocks(KVPool::Pairs pairs, int pool = 0);
    // Carries out a command that the leader's program sent. For the other ranks.
    void obey(std::span<const uint8_t> command);

    int layers() const { return static_cast<int>(layers_.size()); }
    int threads() const { return pool_->size(); }
    mutable InUse in_use;

    int hidden() const { return hidden_; }
    int vocab_size() const { return vocab_size_; }

    // Collected by steps while `profiling` is set.
    bool profiling = false;
    std::map<Profile::Key, ProfileEntry> profile() const {
        const Exclusive mine(in_use);
        return profile_.entries();
    }
    void clear_profile() {
        const Exclusive mine(in_use);
        profile_.clear();
    }

private:
    using Segment = std::vector<Phase>;
    using Clock = std::chrono::steady_clock;

    static constexpr int kHidden = 0, kHeadRows = 1;  // buffer numbers

    // The asks about a chunk of head rows. Each item: asks that share rows, answered one after the other.
    using Items = std::vector<std::vector<int>>;

    Exclusive building() const;
    void seal_segment(const Segment& segment, SegmentKind kind, const std::string& name);
    void check_accesses(const std::vector<Access>& accesses, SegmentKind kind) const;
    void check_head() const;
    void note(const Phase& phase);
    void check(const StepRows& rows) const;
    void note_logits(const LinearPhase& linear);
    size_t exchanged_bytes(const Phase& phase) const;
    void begin_rows(const StepRows& rows);
    void prepare(const StepRows& rows);
    void plan_head(Step& step);
    void send(const StepRows& rows);
    void send(Command command, KVPool::Pairs pairs, int pool);
    KVPool& kv_pool(int number) const;
    void run_rows(const StepRows& rows, Step* step, Clock::time_point start);
    void work(Worker& worker, const StepRows& rows, Step* step);
    int turns_of_step(const StepRows& rows) const;
    // `fill`: runs only the phases that K and V depend on.
    void run_segment(const Segment& segment, SegmentKind kind, unsigned skips, Worker& worker, bool fill = false);
    // Calls f and, if `profiling`, records it as a visit.
    template <class F>
    void visit(Profile::Visit visit, Worker& worker, F f);
    // The next turn: waits until a unit of the weights is in memory.
    void enter(int unit, Worker& worker, const StepRows& rows);
    void gather_chunk(const HeadChunk& chunk, Worker& worker, const StepRows& rows);
    void answer_chunk(const HeadChunk& chunk, const Items& items, Worker& worker, Step& step);

    const std::shared_ptr<ThreadPool> pool_;
    KVGroups kv_;
    const Kernels& kernels_;
    const int hidden_, vocab_size_;
    const Rounding rounding_;
    const float threshold_;
    const std::shared_ptr<Ranks> ranks_;
    const int number_;
    int split_from_ = 0;
    size_t exchanged_bytes_ = 0;  // most of a row, in one exchange
    size_t common_bytes_ = 0;     // of the common buffers
    std::vector<std::shared_ptr<const void>> owners_;
    std::vector<Buffer> buffers_;
    std::vector<bool> of_head_;  // [buffers] whether the buffer has one row per head row instead of per step row
    std::vector<Rope> ropes_;
    Segment embed_, head_;
    std::vector<Segment> layers_;
    Segment* open_ = nullptr;
    bool sealed_ = false;
    int taps_ = 0;
    int ids_ = std::numeric_limits<int>::max(), positions_ = ids_;  // rows of the smallest id and position table
    size_t scratch_bytes_ = 0;
    Turns turns_;
    // One per thread:
    std::vector<Memory> scratch_;
    std::vector<std::vector<const QuantizePhase*>> pending_inputs_;
    std::vector<std::unique_ptr<Sampler>> samplers_;
    // Of the step:
    std::vector<HeadChunk> chunks_;
    std::vector<int32_t> units_;
    std::vector<Items> items_;       // [chunks]
    int logits_ = -1, maxima_ = -1;  // buffer numbers of the head's results; -1: there is no head
    int logits_width_ = 0;
    int first_unit_ = 0, last_unit_ = 0;  // blocks of the vocabulary that this rank computes
    Profile profile_;
    std::shared_ptr<Streaming> streaming_;
    uint32_t passed_ = 0;  // number of the exchange after the step
};

}  // namespace headrace
