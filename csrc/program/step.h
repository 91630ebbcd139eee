// One step: the feeds of its sequences, the rows whose logits it needs (head rows), and the asks about these rows.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "sample/sample.h"
#include "system/in_use.h"

namespace headrace {

// A sequence between steps; the runner owns it.
struct Sequence {
    History history;
    SampleParams params;
    std::array<std::vector<int32_t>, 3> tables{};  // block ids: 0 of its tokens, 1 of its source, 2 of window layers
    int source = 0;                                // tokens of its source; 0: there is no source
    int adapter = 0;                               // number of its adapter (AdapterPhase); 0: none
    NoiseKey key{};                                // default key of its next draw
    mutable InUse in_use{};                        // shared by steps, exclusive for the caller that changes it

    // Replaces tables[table] from `start` on by `blocks`. Throws std::out_of_range if there is no such table or `start`
    // is beyond its end.
    void set_table(size_t table, size_t start, Ids blocks);
};

// A request for a result from rows of logits. Rows are numbered among the head rows of the step.
struct Ask {
    enum class Kind { kDraw, kVerify, kReject, kPropose, kTop, kScore, kLogits };

    Kind kind;
    int row;
    std::shared_ptr<const Sequence> sequence;
    std::vector<NoiseKey> keys{};  // kDraw: one per token to draw; kVerify: one key
    Report report{};
    int k = 0;                                // kTop, kScore: number of alternatives
    int32_t token = -1;                       // kScore: the token to score
    std::vector<int32_t> nodes{}, parents{};  // kVerify: the draft tree whose rows follow `row`
    std::optional<double> mu{};               // kDraw, kVerify: state of mirostat
    std::shared_ptr<const std::vector<uint32_t>>
        allowed{};                        // one bit mask of token ids per row of the feed (Step::mask), or null
    int place = 0;                        // index of this row's mask; 0: row of the last known token
    std::vector<std::vector<float>> q{};  // kReject: the draft distribution of each drafted token, or empty
    bool block = false;                   // kReject: block verification
    std::vector<int32_t> path{};          // kDraw, kPropose: draft tokens between the last known token and this row

    int last_row() const { return row + static_cast<int>(nodes.size()); }
};

// Rule that combines a row of logits with the amateur model's row for the same tokens. See ops/contrast.py.
// kContrast: (1 + beta) * own - beta * amateur where own >= best own logit + ln(alpha), -inf elsewhere. Only allowed
// ids count for the best, so at least one allowed id stays.
// kChow: the amateur's row if its highest probability is at least 1 - alpha, otherwise the own row.
// kOpt: the amateur's row if its highest probability is at least the own highest probability - alpha * total variation
// distance, otherwise the own row.
enum class Rule { kContrast, kChow, kOpt };

struct Combine {
    int row;
    std::vector<float> amateur;
    Rule rule;
    float alpha, beta;
    std::shared_ptr<const Sequence> sequence;
    std::vector<int32_t> path;  // Ask::path
    std::shared_ptr<const std::vector<uint32_t>> allowed;
    int place;
    std::string problem{};  // error of the amateur's answer, copied to all asks about the row
    bool failed = false;    // combining threw, so the row of logits is invalid
};

struct Answer {
    std::vector<TokenReport> reports;
    std::vector<int32_t> path;  // kVerify
    std::vector<float> logits;  // kLogits; kPropose: the distribution of the drawn token
    std::string error;
    std::exception_ptr failure{};  // exception thrown while answering

    // The error or the message of the failure, one line; empty if there is neither.
    std::string problem() const;
};

// Head rows [first, last) whose logits are computed together, and their part of StepRows::units.
struct HeadChunk {
    int32_t first, last;
    int32_t first_unit = 0, last_unit = 0;  // equal: all blocks of the vocabulary
};

// A step as flat arrays: all that computing its rows needs. It does not own them.
struct StepRows {
    std::span<const int32_t> ids;  // [rows]
    StepFeeds feeds;
    std::span<const int32_t> head_rows;  // ascending
    std::span<const HeadChunk> chunks{};
    std::span<const int32_t> units{};     // blocks of the vocabulary that the chunks need, ascending within a chunk
    std::span<const uint8_t> skips;       // Step::skips
    int first_layer, last_layer;          // Step::first_layer
    bool fill;                            // Step::fill
    const float* hidden;                  // Step::hidden
    bool split = false;                   // the ranks split the rows (Phase::by_rows); decided by the leader
    std::span<const int32_t> adapters{};  // [rows] number of each row's adapter, 0 for none; empty: no row has one

    int count() const { return static_cast<int>(ids.size()); }
};

// Built feed by feed, run by a Program, then read. `clear` resets it and keeps its memory.
class Step {
public:
    InUse in_use;  // locked by the callers that build, run or read the step, not by its member functions

    void clear();

    // Adds the known tokens [start, start + count) of a sequence, then the nodes of a draft tree. parents[i] < i; -1
    // stands for the token before KV index start + count. Only nodes may lie beyond the known tokens. The last `logits`
    // rows become head rows. `full`: each node attends to all nodes. Throws std::invalid_argument.
    void feed(std::shared_ptr<const Sequence> sequence, int start, int count, Ids nodes, Ids parents, int logits,
              bool full = false);

    // Allowed tokens of the feed added last: one bit per token, for its last known token and for each node. All asks
    // about the feed apply it, except scores and logits.
    void mask(std::vector<uint32_t> words) {
        allowed_ = std::make_shared<const std::vector<uint32_t>>(std::move(words));
    }

    // Asks about the feed added last. `row` is the number among the feed's head rows. Each returns the number of its
    // (first) answer. A draw at a node continues the path to that node.
    int draw(int row, std::vector<NoiseKey> keys, Report report, std::optional<double> mu);
    int verify(int row, NoiseKey key, Report report, std::optional<double> mu);
    // The draft must be a chain. `q`: the draft distribution of each of its tokens, or empty.
    int reject(int row, NoiseKey key, std::vector<std::vector<float>> q, bool block, Report report);
    int propose(int row, NoiseKey key);
    int top(int row, int k);
    // Each row from `row` on scores the known token that follows it. Sets `count` to the number of answers.
    int score(int row, int k, int& count);
    int logits(int row);
    // Combines a row of logits with the logits of the amateur's answer (moved out of it) before any ask reads the row.
    // An error of the amateur's answer becomes the error of the asks about the row. Throws std::invalid_argument if the
    // answer has neither logits nor an error.
    void combine(int row, Answer& amateur, Rule rule, float alpha, float beta);

    int rows() const { return static_cast<int>(ids_.size()); }
    // The rows of the step and the tables of its sequences, without chunks. Valid until the step changes.
    StepRows flatten();
    std::span<const int32_t> head_rows() const { return head_rows_; }  // ascending
    std::vector<Ask>& asks() { return asks_; }
    std::vector<Answer>& answers() { return answers_; }
    std::vector<Combine>& combined() { return combined_; }  // rows ascending
    std::span<const std::shared_ptr<const Sequence>> sequences() const { return sequences_; }

    // Layers to run: [first_layer, last_layer); last_layer -1: to the end. They start from the ids or from `hidden`.
    int first_layer = 0, last_layer = -1;
    const float* hidden = nullptr;  // [rows][hidden size]; null: the step starts from its ids
    float* hidden_out = nullptr;    // [rows][hidden size] output after the last layer; or null
    bool fill = false;              // each layer only stores K and V, all from the same unchanged hidden rows
    std::vector<uint8_t> skips;     // [layers] bits of the sublayers to skip; may be shorter
    std::vector<float*> taps;       // [taps of the program] output rows of each tap, or null; may be shorter

private:
    // Converts `row`, a head row of the last feed, to its number among all head rows. Throws std::invalid_argument
    // unless it and the `rows` - 1 rows after it are head rows of that feed.
    int head_row(int row, int rows = 1) const;
    StepFeeds feeds();
    int ask(Ask ask, int rows = 1);
    std::vector<int32_t> path_to(int row) const;  // draft tokens between the last feed's last known token and `row`
    int line_up(size_t table, std::vector<int32_t>& lines) const;

    std::vector<int32_t> ids_, positions_, row_start_{0}, kv_start_, known_, tables_, head_rows_;
    std::vector<int32_t> sources_, source_tables_;  // of the sequences; empty if no sequence has a source
    std::vector<int32_t> window_tables_;            // of the sequences; empty if no sequence has such a table
    std::vector<int32_t> adapters_;                 // by row
    bool adapted_ = false;                          // a row has an adapter
    std::vector<uint64_t> masks_;
    std::vector<std::shared_ptr<const Sequence>> sequences_;
    // State of the last feed:
    std::vector<int32_t> nodes_, parents_;
    std::shared_ptr<const std::vector<uint32_t>> allowed_;
    int first_head_row_ = 0, last_known_ = 0;  // number of its first head row, and of its last known token's
    std::vector<Ask> asks_;
    std::vector<Answer> answers_;
    std::vector<Combine> combined_;
};

// Rows of logits and their block maxima. The first row is head row `base`.
struct Logits {
    float* values;
    int64_t stride;
    const float* maxima;
    int64_t maxima_stride;
    int base;
    int vocab_size;
    std::span<const Combine> combined{};  // the combined rows among them
};

// Numbers, ascending, of the blocks of kVocabBlock tokens that contain an allowed token of head rows [first, last). The
// asks read no other block. Empty (all blocks) if a row has no limit or an ask needs the whole row.
std::vector<int32_t> wanted_units(std::span<const Ask> asks, int first, int last, int vocab_size);

// Replaces a row of logits and its block maxima by the combined row. On an exception the asks about the row fail.
void combine(Combine& pair, const Logits& logits, const SampleKernels& kernels) noexcept;

// Answers one ask. Changes the logits temporarily, so asks that share rows must not run at the same time. Stores
// exceptions, such as std::bad_alloc, in the answer, so that the other asks of the step succeed.
void answer(Sampler& sampler, const Ask& ask, Answer& out, const Logits& logits) noexcept;

}  // namespace headrace
