// Checks a program once, as a whole. Rejects descriptions that would crash; makes local inputs shared where their
// result would depend on timing.
#include <algorithm>
#include <map>
#include <stdexcept>

#include "program/program.h"
#include "sample/kernels.h"

namespace headrace {
namespace {

using Holds = Access::Holds;

bool is_input(const Access& access) { return access.holds != Holds::kFloats; }

bool overlap(const Access& a, const Access& b) {
    return a.place.buffer == b.place.buffer && a.place.column < b.place.column + b.width &&
           b.place.column < a.place.column + a.width;
}

bool same(const Access& a, const Access& b) {
    return a.place.buffer == b.place.buffer && a.place.column == b.place.column && a.width == b.width;
}

bool fits(const Access& access, const Buffer& buffer) {
    switch (access.holds) {
        case Holds::kFloats:
            return buffer.kind() == BufferKind::kFloat;
        case Holds::kA8:
            return buffer.kind() == BufferKind::kA8;
        case Holds::kBf16:
            return buffer.kind() == BufferKind::kBf16;
        case Holds::kPartial:
            return buffer.kind() == BufferKind::kPartial;
        case Holds::kInput:
            return buffer.input();
        case Holds::kResult:
            if (buffer.kind() == BufferKind::kPartial) return false;
            // Written piece by piece, so the scale of a whole row is not known: only A8 with a scale per group works.
            return !buffer.local() && (buffer.kind() != BufferKind::kA8 ||
                                       (access.piece % 32 == 0 && buffer.rounding() == Rounding::kGroup));
    }
    return false;
}

// Tracks the inputs of a segment's linear layers, by buffer, from the phase that computes them to those that read them.
class Inputs {
public:
    explicit Inputs(std::vector<Buffer>& buffers) : buffers_(buffers) {}

    // Each thread computes a local input when it reaches work that reads it, which may be late. If another phase may
    // have overwritten the input's source rows by then, the buffer is made shared.
    void see(const Phase& phase, const std::vector<Access>& accesses) {
        for (const Access& access : accesses) {
            if (!access.writes) continue;
            for (auto& [buffer, input] : made_) input.late |= input.local && overlap(access, input.source);
        }
        for (const Access& access : accesses) {
            if (!access.writes && is_input(access)) read(phase, access.place.buffer);
        }
        for (const Access& access : accesses) {
            if (!access.writes || !is_input_buffer(access.place.buffer)) continue;
            const bool local = std::holds_alternative<QuantizePhase>(phase.work);
            made_[access.place.buffer] = {phase.sublayer, local, local ? accesses.front() : Access{}, false};
        }
    }

private:
    struct Made {
        uint8_t sublayer;
        bool local;
        Access source;  // local: the rows that it is computed from
        bool late;      // a later phase has overwritten `source`
    };

    // Partial results are like inputs: nothing reads them before they are complete.
    bool is_input_buffer(int buffer) const {
        return buffers_[static_cast<size_t>(buffer)].kind() != BufferKind::kFloat;
    }

    void read(const Phase& phase, int buffer) {
        const auto found = made_.find(buffer);
        require(found != made_.end(), "reads buffer " + std::to_string(buffer) + " before the segment has made it");
        require((found->second.sublayer & ~phase.sublayer) == 0,
                "reads buffer " + std::to_string(buffer) +
                    ", which is left out with a sublayer that it does not belong to");
        if (found->second.late) buffers_[static_cast<size_t>(buffer)].make_together();
    }

    std::vector<Buffer>& buffers_;
    std::map<int, Made> made_;
};

}  // namespace

void Program::seal() {
    if (sealed_) return;
    const Exclusive mine(in_use);
    seal_segment(embed_, SegmentKind::kEmbed, "embed");
    for (size_t i = 0; i < layers_.size(); ++i)
        seal_segment(layers_[i], SegmentKind::kLayer, "layer " + std::to_string(i));
    seal_segment(head_, SegmentKind::kHead, "head");
    check_head();
    sealed_ = true;
}

void Program::seal_segment(const Segment& segment, SegmentKind kind, const std::string& name) {
    const ProgramShape shape{hidden_, vocab_size_, taps_, kv_, ropes_, buffers_, ranks_.get()};
    Inputs inputs(buffers_);
    for (size_t i = 0; i < segment.size(); ++i) {
        const Phase& phase = segment[i];
        try {
            const std::vector<Access> accesses = needs_of(phase, kind, shape);
            for (const Access& access : accesses) shape.buffer(access.place.buffer);
            check_accesses(accesses, kind);
            inputs.see(phase, accesses);
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(name + ", phase " + std::to_string(i) +
                                        (phase.name.empty() ? "" : " (" + phase.name + ")") + ": " + error.what());
        }
        note(phase);
    }
}

void Program::check_accesses(const std::vector<Access>& accesses, SegmentKind kind) const {
    for (const Access& access : accesses) {
        const size_t number = static_cast<size_t>(access.place.buffer);
        const Buffer& buffer = buffers_[number];
        const std::string words = in_words(access);
        require(of_head_[number] == (kind == SegmentKind::kHead),
                words + " has a row for each row " + (of_head_[number] ? "of the head" : "of the step") +
                    ", and this phase works on the others");
        require(fits(access, buffer), words + " is not of the kind that is read or written here");
        const bool whole = buffer.input();
        require(access.width > 0 && access.place.column >= 0 &&
                    (whole ? access.place.column == 0 && access.width == buffer.width()
                           : access.place.column + access.width <= buffer.width()),
                words + " cannot be " + std::to_string(access.width) + " columns: the buffer has " +
                    std::to_string(buffer.width()));
    }
    for (const Access& out : accesses) {
        for (const Access& other : accesses) {
            if (&out == &other || !out.writes || !overlap(out, other)) continue;
            require(!other.writes && out.in_place && same(out, other),
                    "writes " + in_words(out) + " while it uses " + in_words(other));
        }
    }
}

// Records the limits that steps are checked against, and the scratch size.
void Program::note(const Phase& phase) {
    scratch_bytes_ = std::max(scratch_bytes_, scratch_bytes(phase));
    exchanged_bytes_ = std::max(exchanged_bytes_, exchanged_bytes(phase));
    const auto reserve_scratch = [&](size_t floats) {
        scratch_bytes_ = std::max(scratch_bytes_, floats * sizeof(float));
    };
    if (const auto* work = std::get_if<AttentionPhase>(&phase.work)) {
        KVGroup& kv = *kv_[static_cast<size_t>(work->pool)];
        reserve_scratch(kv.attention.scratch_floats(work->view.group_of(kv.pool->shape())));
        if (work->pool > 0) kv.attention.set_reach(std::max(kv.attention.reach(), work->view.window));
    }
    if (const auto* work = std::get_if<StorePhase>(&phase.work))
        reserve_scratch(kv_[static_cast<size_t>(work->pool)]->attention.scratch_floats());
    if (const auto* linear = std::get_if<LinearPhase>(&phase.work); linear && linear->kind == EpilogueKind::kLogits)
        note_logits(*linear);
    if (const auto* scatter = std::get_if<ScatterPhase>(&phase.work))
        logits_ = scatter->out, maxima_ = scatter->maxima, logits_width_ = scatter->vocab_size;
    if (const auto* embed = std::get_if<EmbedPhase>(&phase.work)) {
        ids_ = std::min(ids_, embed->borders.empty() ? embed->table.n : embed->borders.back());
        if (embed->positions) positions_ = std::min(positions_, embed->positions->n);
    }
}

void Program::note_logits(const LinearPhase& linear) {
    const Buffer& out = buffers_[static_cast<size_t>(linear.out.buffer)];
    logits_ = linear.out.buffer, maxima_ = linear.maxima;
    // The ranks write the columns of a common buffer together.
    logits_width_ = out.common() ? out.width() : linear.linear.n();
    first_unit_ = linear.out.column / kVocabBlock;
    last_unit_ = first_unit_ + (linear.linear.n() + kVocabBlock - 1) / kVocabBlock;
}

// Bytes that each row of a step takes in an exchange.
size_t Program::exchanged_bytes(const Phase& phase) const {
    const auto bytes = [&](int buffer) { return buffers_[static_cast<size_t>(buffer)].row_bytes(); };
    if (const auto* reduce = std::get_if<ReducePhase>(&phase.work)) return bytes(reduce->partial);
    if (const auto* embed = std::get_if<EmbedPhase>(&phase.work); embed && !embed->borders.empty())
        return bytes(embed->out);
    if (const auto* gather = std::get_if<GatherPhase>(&phase.work);
        gather && !buffers_[static_cast<size_t>(gather->buffer)].common())
        return bytes(gather->buffer);
    return std::holds_alternative<ExtremePhase>(phase.work) ? sizeof(float) : 0;
}

void Program::check_head() const {
    require(logits_ < 0 || logits_width_ == vocab_size_,
            "the head ends with logits of " + std::to_string(logits_width_) + " of " + std::to_string(vocab_size_) +
                " tokens; the others need a place, too");
}

}  // namespace headrace
