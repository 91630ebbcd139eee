// A model as phases that all threads of a pool run together, one after the other: one call for each step.
//
// A program is built once, phase by phase, in segments: embed, one for each layer, head. Values are rows in buffers. A
// step runs embed or starts from given hidden rows, runs some of the layers, and the head on chosen rows. A row's
// result depends on that row alone, however the threads share the work and whatever else is in the step.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "program/needs.h"
#include "program/phases.h"
#include "program/profile.h"
#include "program/step.h"
#include "system/in_use.h"
#include "system/threadpool.h"

namespace headrace {

class Program {
public:
    // `hidden`: width of the hidden rows. Buffer 0 holds those of the step, buffer 1 those that go through the head.
    // `rounding`: how inputs of integer layers become integers; `threshold`: as A8 has it.
    Program(std::shared_ptr<ThreadPool> pool, std::shared_ptr<KVPool> kv, const Kernels& kernels, int hidden,
            int vocab_size, Rounding rounding = Rounding::kGroup, float threshold = 0.0f);

    // Building. What is wrong in a description is found when it is sealed, by the builder or by the first step: then
    // std::invalid_argument names the phase. Nothing can be added after that.
    int add_buffer(BufferKind kind, int width, bool local = false);
    int add_rope(Rope rope);
    // Pair i turns by frequencies[i] radians a position; angles, cos and sin are formed in float64.
    int add_rope(const std::vector<double>& frequencies, int positions, bool interleaved);
    int add_tap();
    int taps() const { return taps_; }
    void keep(std::shared_ptr<const void> owner) { owners_.push_back(std::move(owner)); }  // e.g. an arena of weights
    void begin(SegmentKind kind);                                                          // kLayer: a new one
    void add(Phase phase);
    void seal();

    // Carries out a step and fills its answers. The program, its KV pool and the sequences are in use meanwhile, the
    // step is the caller's. Throws std::runtime_error where another thread uses one of these, std::out_of_range,
    // std::invalid_argument for a step that does not fit, ForkedError after a fork; then nothing was computed.
    void run(Step& step);

    int layers() const { return static_cast<int>(layers_.size()); }
    int threads() const { return pool_->size(); }
    mutable InUse in_use;

    int hidden() const { return hidden_; }
    int vocab_size() const { return vocab_size_; }
    KVPool& kv() const { return *kv_; }

    // Gathered while `profiling` is set.
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

    static constexpr int kHidden = 0, kHeadRows = 1;  // buffers
    static constexpr int kMostHeadRows = 80;          // whose logits are held at once; more than a draft tree has

    // Some of the rows that go through the head, and the asks about them.
    struct Chunk {
        int first, last;
        std::vector<std::vector<int>> items;  // asks that share rows, one after the other
        std::vector<int32_t> units{};         // of the head that some mask allows, where all rows have one; or none
    };

    Exclusive building() const;
    void seal_segment(const Segment& segment, SegmentKind kind, const std::string& name);
    void check_accesses(const std::vector<Access>& accesses, SegmentKind kind) const;
    void check_head() const;
    void note(const Phase& phase);
    void check(const Step& step) const;
    void prepare(Step& step);
    void plan_head(Step& step);
    void work(Worker& worker, Step& step);
    int turns() const;
    // `fill`: of its phases those alone that K and V need.
    void run_segment(const Segment& segment, SegmentKind kind, unsigned skips, Worker& worker, bool fill = false);
    // Does something as a visit of the profile, where one is wanted.
    template <class F>
    void visit(Profile::Visit visit, Worker& worker, F f);
    void run_chunk(const Chunk& chunk, Worker& worker, Step& step);
    void gather_chunk(const Chunk& chunk, Worker& worker, const Step& step);
    void answer_chunk(const Chunk& chunk, Worker& worker, Step& step);

    const std::shared_ptr<ThreadPool> pool_;
    const std::shared_ptr<KVPool> kv_;
    const Kernels& kernels_;
    const int hidden_, vocab_size_;
    const Rounding rounding_;
    const float threshold_;
    std::vector<std::shared_ptr<const void>> owners_;
    std::vector<Buffer> buffers_;
    std::vector<bool> of_head_;  // buffers with a row for each row that goes through the head
    std::vector<Rope> ropes_;
    Segment embed_, head_;
    std::vector<Segment> layers_;
    Segment* open_ = nullptr;
    bool sealed_ = false;
    int taps_ = 0;
    int ids_ = std::numeric_limits<int>::max(), positions_ = ids_;  // that its tables have
    AttentionStep attention_;
    size_t scratch_bytes_ = 0;
    Turns turns_;
    // Of each thread:
    std::vector<Memory> scratch_;
    std::vector<std::vector<const QuantizePhase*>> pending_inputs_;
    std::vector<std::unique_ptr<Sampler>> samplers_;
    std::vector<Chunk> chunks_;
    int logits_ = -1, maxima_ = -1;  // buffers of the head's results
    int logits_width_ = 0;
    Profile profile_;
};

}  // namespace headrace
