#include "program/program.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <stdexcept>

namespace headrace {
namespace {

constexpr const char* kFillAnswersNothing =
    "a step that only stores K and V begins with hidden rows, and answers nothing";

// Shared locks on the sequences of a step.
class Readers {
public:
    explicit Readers(std::span<const std::shared_ptr<const Sequence>> sequences) {
        held_.reserve(sequences.size());
        for (const auto& sequence : sequences) held_.emplace_back(sequence->in_use);
    }

private:
    std::vector<Shared> held_;
};

// Locks all pools of a program.
std::deque<Exclusive> locked(const KVGroups& groups) {
    std::deque<Exclusive> held;
    for (const auto& each : groups) held.emplace_back(each->pool->in_use);
    return held;
}

// The elements with first <= row < last; `combined` is sorted by row.
std::span<Combine> within(std::vector<Combine>& combined, int first, int last) {
    const auto before = [](const Combine& pair, int row) { return pair.row < row; };
    return {std::lower_bound(combined.begin(), combined.end(), first, before),
            std::lower_bound(combined.begin(), combined.end(), last, before)};
}

// Sorts the parts of a unit, and joins those that overlap or are at most a cache line apart: a few long reads.
void merge(Streaming::Unit& unit) {
    std::sort(unit.begin(), unit.end(), [](const auto& a, const auto& b) { return a.data() < b.data(); });
    Streaming::Unit joined;
    for (const auto& part : unit) {
        const uint8_t* end = part.data() + part.size();
        if (joined.empty() || part.data() > joined.back().data() + joined.back().size() + 64) {
            joined.push_back(part);
        } else if (const uint8_t* begin = joined.back().data(); end > begin + joined.back().size()) {
            joined.back() = {begin, static_cast<size_t>(end - begin)};
        }
    }
    unit = std::move(joined);
}

template <class Work, class F>
void each(const std::vector<Phase>& segment, F f) {
    for (const Phase& phase : segment) {
        if (const Work* work = std::get_if<Work>(&phase.work)) f(*work);
    }
}

}  // namespace

Program::Program(std::shared_ptr<ThreadPool> pool, std::shared_ptr<KVPool> kv, const Kernels& kernels, int hidden,
                 int vocab_size, Rounding rounding, float threshold, std::shared_ptr<Ranks> ranks, int number,
                 std::shared_ptr<KVPool> windows)
    : pool_(std::move(pool)),
      kernels_(kernels),
      hidden_(hidden),
      vocab_size_(vocab_size),
      rounding_(rounding),
      threshold_(threshold),
      ranks_(std::move(ranks)),
      number_(number),
      scratch_(static_cast<size_t>(pool_->size())),
      pending_inputs_(static_cast<size_t>(pool_->size())) {
    require(vocab_size > 0, "a program has at least one token");
    for (auto& each : {std::move(kv), std::move(windows)}) {
        if (each) kv_.push_back(std::make_unique<KVGroup>(each, kernels_, pool_->size()));
    }
    add_buffer(BufferKind::kFloat, hidden);
    add_buffer(BufferKind::kFloat, hidden);
    of_head_[kHeadRows] = true;
    for (int i = 0; i < pool_->size(); ++i)
        samplers_.push_back(std::make_unique<Sampler>(*kernels_.sample, vocab_size));
}

Exclusive Program::building() const {
    require(!sealed_, "the program is sealed: nothing can be added to it");
    return Exclusive(in_use);
}

void Program::begin(SegmentKind kind) {
    const Exclusive mine = building();
    open_ = kind == SegmentKind::kEmbed ? &embed_ : kind == SegmentKind::kHead ? &head_ : &layers_.emplace_back();
}

int Program::add_buffer(BufferKind kind, int width, bool local) {
    const Exclusive mine = building();
    buffers_.emplace_back(kind, width, local, pool_->size(), rounding_, threshold_);
    of_head_.push_back(open_ == &head_);
    return static_cast<int>(buffers_.size()) - 1;
}

int Program::add_common_buffer(int width) {
    const Exclusive mine = building();
    require(ranks_ && open_ == &head_, "a buffer of all ranks belongs to the head of a program that has ranks");
    const size_t bytes = static_cast<size_t>(Buffer::stride_of(width)) * sizeof(float) * kMostHeadRows;
    require(common_bytes_ + bytes <= static_cast<size_t>(ranks_->sizes().common_bytes),
            "the ranks' region has no room for the logits; make it for a larger vocabulary");
    buffers_.emplace_back(width, ranks_->common() + common_bytes_, bytes);
    common_bytes_ += bytes;
    of_head_.push_back(true);
    return static_cast<int>(buffers_.size()) - 1;
}

int Program::add_tap() {
    const Exclusive mine = building();
    return taps_++;
}

int Program::add_rope(Rope rope) {
    const Exclusive mine = building();
    require(rope.dim > 0 && rope.dim % 2 == 0 && rope.cos.size() == rope.sin.size() &&
                rope.cos.size() % static_cast<size_t>(rope.dim / 2) == 0,
            "cos and sin have dim / 2 values for each position");
    ropes_.push_back(std::move(rope));
    return static_cast<int>(ropes_.size()) - 1;
}

int Program::add_rope(const std::vector<double>& frequencies, int positions, bool interleaved, double amplitude,
                      double growth, int length) {
    const size_t pairs = frequencies.size(), size = pairs * static_cast<size_t>(positions);
    Rope rope{std::vector<float>(size), std::vector<float>(size), static_cast<int>(2 * pairs), interleaved};
    std::atomic<int> next{0};
    const auto fill = [&](int) {
        for (int position; (position = next.fetch_add(1)) < positions;) {
            const double factor = amplitude * (1.0 + growth * std::log1p(position / length));
            for (size_t i = 0; i < pairs; ++i) {
                const double angle = position * frequencies[i];
                const size_t at = static_cast<size_t>(position) * pairs + i;
                rope.cos[at] = static_cast<float>(factor * std::cos(angle));
                rope.sin[at] = static_cast<float>(factor * std::sin(angle));
            }
        }
    };
    pool_->run(fill, ThreadPool::Crew::kAvailable);
    return add_rope(std::move(rope));
}

void Program::add(Phase phase) {
    const Exclusive mine = building();
    require(open_, "a segment must be begun before phases are added");
    open_->push_back(std::move(phase));
}

void Program::check(const StepRows& rows) const {
    const int last = rows.last_layer < 0 ? layers() : rows.last_layer;
    require(rows.count() > 0, "a step has at least one row");
    require(rows.first_layer >= 0 && rows.first_layer <= last && last <= layers(),
            "a step names layers that the model has not");
    require(rows.first_layer == 0 || rows.hidden, "a step that does not begin with layer 0 needs hidden rows");
    require(rows.hidden || !embed_.empty(), "a step needs hidden rows where a program looks no tokens up");
    require(rows.head_rows.empty() || logits_ >= 0, "the program has no head");
    require(!rows.fill || (rows.hidden && rows.head_rows.empty()), kFillAnswersNothing);
    int positions = positions_;
    for (const Rope& rope : ropes_) positions = std::min(positions, rope.positions());
    for (const int32_t id : rows.ids) {
        if (id < 0 || id >= ids_) throw std::out_of_range("a token id is outside the vocabulary");
    }
    for (const int32_t position : rows.feeds.positions) {
        if (position < 0 || position >= positions)
            throw std::out_of_range("a position is beyond those the model knows");
    }
}

void Program::split_from(int rows) {
    require(rows == 0 || rows > Buffer::kLocalTiles,
            "rows are split from " + std::to_string(Buffer::kLocalTiles + 1) + " on, not from " + std::to_string(rows));
    split_from_ = rows;
}

// The checks of a step that depend on its rows alone.
void Program::begin_rows(const StepRows& rows) {
    check(rows);
    if (ranks_) {
        const size_t row = std::max(exchanged_bytes_, rows.split ? buffers_[kHidden].row_bytes() : 0);
        require(row * static_cast<size_t>(rows.count()) <= static_cast<size_t>(ranks_->sizes().slot_bytes),
                "a step of " + std::to_string(rows.count()) + " rows does not fit the ranks' region");
    }
    kv_.front()->attention.begin(rows.feeds, rows.fill);
    if (kv_.size() > 1) kv_.back()->attention.begin(rows.feeds.in_windows(), rows.fill);
}

// Allocates memory and builds attention layouts, on one thread.
void Program::prepare(const StepRows& rows) {
    for (const auto& each : kv_) each->pool->provide(*pool_, each->attention.blocks());
    const auto attention = [&](int pool) -> AttentionStep& { return kv_[static_cast<size_t>(pool)]->attention; };
    for (int i = rows.first_layer; i < (rows.last_layer < 0 ? layers() : rows.last_layer); ++i) {
        const Segment& layer = layers_[static_cast<size_t>(i)];
        each<AttentionPhase>(layer, [&](const AttentionPhase& work) { attention(work.pool).layout(work.view); });
        each<StorePhase>(layer, [&](const StorePhase& work) { attention(work.pool).list_appends(); });
    }
    const int head_rows = std::min(static_cast<int>(rows.head_rows.size()), kMostHeadRows);
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].reserve(of_head_[i] ? head_rows : rows.count());
    for (Memory& scratch : scratch_) scratch.reserve(scratch_bytes_);
    for (auto& pending_input : pending_inputs_) pending_input.assign(buffers_.size(), nullptr);
    if (rows.hidden) {
        Buffer& to = buffers_[kHidden];
        for (int r = 0; r < rows.count(); ++r) {
            std::memcpy(to.floats() + r * to.stride(), rows.hidden + int64_t{r} * hidden_,
                        sizeof(float) * static_cast<size_t>(hidden_));
        }
    }
    const int turns = turns_of_step(rows);
    turns_.begin(turns, pool_->size());
    if (profiling) profile_.begin(pool_->size(), static_cast<size_t>(turns));
}

// Maximum number of turns that the step can take.
int Program::turns_of_step(const StepRows& rows) const {
    const auto of = [](const Segment& segment) {
        int count = 0;
        for (const Phase& phase : segment) count += turns_of(phase);
        return count;
    };
    // Also: one for each unit of the weights; two to gather the hidden rows and one to copy them; for each chunk, to
    // meet the ranks, gather and answer.
    int count = of(embed_) + 4 + layers() + static_cast<int>(rows.chunks.size()) * (of(head_) + 5);
    for (const Segment& layer : layers_) count += of(layer);
    return count;
}

// Cuts the head rows into chunks without splitting a draft tree, and groups asks that share rows into one item.
void Program::plan_head(Step& step) {
    std::vector<Ask>& asks = step.asks();
    std::vector<int> order(asks.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return asks[static_cast<size_t>(a)].row < asks[static_cast<size_t>(b)].row; });
    step.answers().assign(asks.size(), {});
    chunks_.clear();
    units_.clear();
    items_.clear();
    const int rows = static_cast<int>(step.head_rows().size());
    size_t at = 0;
    for (int first = 0; first < rows;) {
        HeadChunk chunk{first, std::min(first + kMostHeadRows, rows)};
        Items items;
        for (int last_row = -1; at < order.size(); ++at) {
            const Ask& ask = asks[static_cast<size_t>(order[at])];
            if (ask.row >= chunk.last) break;
            if (ask.last_row() >= chunk.last) {
                chunk.last = ask.row;
                break;
            }
            if (ask.row > last_row) items.emplace_back();
            items.back().push_back(order[at]);
            last_row = std::max(last_row, ask.last_row());
        }
        first = chunk.last;
        chunk.first_unit = static_cast<int32_t>(units_.size());
        if (step.combined().empty()) {
            const std::vector<int32_t> wanted = wanted_units(asks, chunk.first, chunk.last, vocab_size_);
            units_.insert(units_.end(), wanted.begin(), wanted.end());
        }
        chunk.last_unit = static_cast<int32_t>(units_.size());
        chunks_.push_back(chunk);
        items_.push_back(std::move(items));
    }
}

void Program::stream(std::shared_ptr<Streaming> streaming) {
    const Exclusive mine(in_use);
    require(!streaming || streaming->units() == 2 + layers(), "weights are streamed by embed, each layer and the head");
    streaming_ = std::move(streaming);
}

std::vector<Streaming::Unit> Program::weight_units() const {
    std::vector<Streaming::Unit> units(2 + layers_.size());
    const auto add_tensor = [](Streaming::Unit& unit, const PackedTensor& tensor) {
        const auto rows = static_cast<int64_t>(tensor.row_blocks());
        const int64_t bytes = (rows - 1) * tensor.stride + row_block_bytes(tensor.kind, tensor.k);
        unit.emplace_back(tensor.data, static_cast<size_t>(bytes));
        if (tensor.bias)
            unit.emplace_back(reinterpret_cast<const uint8_t*>(tensor.bias), sizeof(float) * 16 * size_t(rows));
    };
    const auto add_linears = [&](const Segment& segment, Streaming::Unit& unit) {
        each<LinearPhase>(segment, [&](const LinearPhase& work) {
            for (const PackedTensor& tensor : work.linear.parts()) add_tensor(unit, tensor);
        });
    };
    for (size_t i = 0; i < layers_.size(); ++i) add_linears(layers_[i], units[1 + i]);
    add_linears(head_, units.back());
    each<EmbedPhase>(embed_, [&](const EmbedPhase& work) {
        const auto tied = [&](const auto& part) { return part.data() == work.table.data; };
        if (std::none_of(units.back().begin(), units.back().end(), tied)) add_tensor(units[0], work.table);
        if (work.positions) add_tensor(units[0], *work.positions);
    });
    for (Streaming::Unit& unit : units) merge(unit);
    return units;
}

void Program::send(const StepRows& rows) { ranks_->send(write_rows(rows, hidden_, number_, ranks_->next_message())); }

void Program::send(Command command, KVPool::Pairs pairs, int pool) {
    if (!ranks_) return;
    require(ranks_->rank() == 0, "the first rank sends the commands");
    ranks_->send(write_pairs(command, pairs, pool, number_, ranks_->next_message()));
}

KVPool& Program::kv_pool(int number) const {
    require(number >= 0 && number < static_cast<int>(kv_.size()), "no such KV pool");
    return *kv_[static_cast<size_t>(number)]->pool;
}

void Program::move(KVPool::Pairs pairs, int pool) {
    kv_pool(pool).move(pairs);
    send(Command::kMove, pairs, pool);
}

void Program::copy_blocks(KVPool::Pairs pairs, int pool) {
    kv_pool(pool).copy_blocks(pairs);
    send(Command::kCopy, pairs, pool);
}

void Program::obey(std::span<const uint8_t> message) {
    const ReadCommand command(message);
    if (command.kind == Command::kMove) return kv_pool(command.pool).move(command.pairs);
    if (command.kind == Command::kCopy) return kv_pool(command.pool).copy_blocks(command.pairs);
    seal();
    const Exclusive mine(in_use);
    const auto pages = locked(kv_);
    begin_rows(command.rows);
    run_rows(command.rows, nullptr, Clock::now());
}

void Program::run(Step& step) {
    seal();
    const Exclusive mine(in_use);
    const auto pages = locked(kv_);
    const Readers readers(step.sequences());
    const auto start = Clock::now();
    StepRows rows = step.flatten();
    require(!rows.fill || !step.hidden_out, kFillAnswersNothing);
    // A tap copies all rows, and the other ranks do not know of it.
    const bool tapped =
        std::any_of(step.taps.begin(), step.taps.end(), [](const float* tap) { return tap != nullptr; });
    rows.split = ranks_ && split_from_ > 0 && rows.count() >= split_from_ && !tapped;
    begin_rows(rows);
    plan_head(step);
    rows.chunks = chunks_, rows.units = units_;
    if (ranks_) {
        require(ranks_->rank() == 0, "the first rank runs the steps");
        send(rows);
    }
    run_rows(rows, &step, start);
}

// Runs the rows of a step that began at `start`, and answers its asks on the leader.
void Program::run_rows(const StepRows& rows, Step* step, Clock::time_point start) {
    double prepared = 0;
    try {
        prepare(rows);
        prepared = std::chrono::duration<double>(Clock::now() - start).count();
        StepRun run{kernels_,  buffers_,      ropes_,
                    kv_,       rows,          step ? std::span<float* const>(step->taps) : std::span<float* const>{},
                    turns_,    pool_->size(), ranks_.get(),
                    rows.split};
        const auto part = [&](int thread) {
            const size_t number = static_cast<size_t>(thread);
            Worker worker{run, thread, scratch_[number].data(), pending_inputs_[number]};
            if (ranks_) worker.exchange = ranks_->exchange();
            try {
                work(worker, rows, step);
            } catch (...) {
                turns_.give_up();
                throw;
            }
            if (thread == 0) passed_ = worker.exchange;
        };
        pool_->run(part, ThreadPool::Crew::kAvailable);
    } catch (...) {
        if (ranks_) ranks_->give_up();
        throw;
    }
    if (ranks_) {
        ranks_->passed(passed_);
        ranks_->check();
    }
    if (profiling)
        profile_.end(rows.count(), prepared, {hidden_, vocab_size_, taps_, kv_, ropes_, buffers_, ranks_.get()},
                     kernels_);
}

void Program::work(Worker& worker, const StepRows& rows, Step* step) {
    worker.rows = rows.count();
    if (!rows.hidden) enter(0, worker, rows);
    if (!rows.hidden) run_segment(embed_, SegmentKind::kEmbed, 0, worker);
    const int last = rows.last_layer < 0 ? layers() : rows.last_layer;
    for (int i = rows.first_layer; i < last; ++i) {
        const size_t layer = static_cast<size_t>(i);
        enter(1 + i, worker, rows);
        const unsigned skips = layer < rows.skips.size() ? rows.skips[layer] : 0;
        run_segment(layers_[layer], SegmentKind::kLayer, skips, worker, rows.fill);
    }
    if (worker.run.splits) gather_rows(buffers_[kHidden], worker);
    if (step && step->hidden_out) {
        const Buffer& from = buffers_[kHidden];
        worker.share(rows.count(), [&](int first, int end) {
            for (int r = first; r < end; ++r) {
                std::memcpy(step->hidden_out + int64_t{r} * hidden_, from.floats() + r * from.stride(),
                            sizeof(float) * static_cast<size_t>(hidden_));
            }
        });
    }
    for (size_t i = 0; i < rows.chunks.size(); ++i) {
        const HeadChunk& chunk = rows.chunks[i];
        if (ranks_ && i > 0) {  // the leader has read the common logits of the chunk before
            worker.share(1, [&](int, int) { worker.meet(); });
            ++worker.exchange;
        }
        worker.rows = chunk.last - chunk.first;
        visit({"head rows", nullptr, SegmentKind::kHead, worker.rows, 0, 0}, worker,
              [&] { gather_chunk(chunk, worker, rows); });
        worker.units = rows.units.subspan(static_cast<size_t>(chunk.first_unit),
                                          static_cast<size_t>(chunk.last_unit - chunk.first_unit));
        enter(1 + layers(), worker, rows);
        run_segment(head_, SegmentKind::kHead, 0, worker);
        if (!step) continue;
        visit({"answers", nullptr, SegmentKind::kHead, worker.rows, 0, 0}, worker,
              [&] { answer_chunk(chunk, items_[i], worker, *step); });
    }
}

template <class F>
void Program::visit(Profile::Visit visit, Worker& worker, F f) {
    if (!profiling) return f();
    worker.busy = &visit.busy;
    const auto start = Clock::now();
    f();
    visit.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    worker.busy = nullptr;
    profile_.visits(worker.thread).push_back(visit);
}

void Program::run_segment(const Segment& segment, SegmentKind kind, unsigned skips, Worker& worker, bool fill) {
    for (const Phase& phase : segment) {
        if (phase.sublayer & skips || (fill && !phase.fills)) continue;
        visit({nullptr, &phase, kind, worker.rows, 0, 0}, worker, [&] { run_phase(phase, worker); });
    }
}

void Program::enter(int unit, Worker& worker, const StepRows& rows) {
    if (!streaming_) return;
    const int layer = rows.last_layer < 0 ? layers() : rows.last_layer;
    worker.share(1, [&](int, int) { streaming_->enter(unit, rows.chunks.empty() ? layer : 1 + layers()); });
}

// Copies the hidden rows of a chunk into the head's buffer.
void Program::gather_chunk(const HeadChunk& chunk, Worker& worker, const StepRows& rows) {
    const Buffer &from = buffers_[kHidden], &to = buffers_[kHeadRows];
    const Buffer* maxima = chunk.first_unit == chunk.last_unit ? nullptr : &buffers_[static_cast<size_t>(maxima_)];
    worker.share(worker.rows, [&](int first, int last) {
        for (int r = first; r < last; ++r) {
            const int row = rows.head_rows[static_cast<size_t>(chunk.first + r)];
            std::memcpy(to.floats() + r * to.stride(), from.floats() + row * from.stride(),
                        sizeof(float) * static_cast<size_t>(hidden_));
            if (!maxima) continue;
            float* row_maxima = maxima->floats() + r * maxima->stride();  // blocks that are not computed stay at -inf
            const bool all = !maxima->common();
            std::fill(row_maxima + (all ? 0 : first_unit_), row_maxima + (all ? maxima->width() : last_unit_),
                      -std::numeric_limits<float>::infinity());
        }
    });
}

// Answers the asks about a chunk from its logits.
void Program::answer_chunk(const HeadChunk& chunk, const Items& items, Worker& worker, Step& step) {
    const Buffer &logits = buffers_[static_cast<size_t>(logits_)], &maxima = buffers_[static_cast<size_t>(maxima_)];
    Sampler& sampler = *samplers_[static_cast<size_t>(worker.thread)];
    const std::span<Combine> combined = within(step.combined(), chunk.first, chunk.last);
    const Logits rows{logits.floats(), logits.stride(), maxima.floats(), maxima.stride(),
                      chunk.first,     vocab_size_,     combined};
    if (!combined.empty()) {
        worker.deal(static_cast<int>(combined.size()),
                    [&](int i, int) { combine(combined[static_cast<size_t>(i)], rows, *kernels_.sample); });
    }
    worker.deal(static_cast<int>(items.size()), [&](int item, int) {
        for (const int ask : items[static_cast<size_t>(item)]) {
            answer(sampler, step.asks()[static_cast<size_t>(ask)], step.answers()[static_cast<size_t>(ask)], rows);
        }
    });
}

}  // namespace headrace
