// What one step computes: feeds of sequences, the rows of them whose logits are wanted, and what is asked of those.
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

// A sequence as a runner knows it between steps.
struct Sequence {
    History history;
    SampleParams params;
    std::array<std::vector<int32_t>, 2> tables{};  // block ids: of its tokens, of its source
    int source = 0;                                // tokens of its source, whose K and V table 1 has; 0: it has none
    NoiseKey key{};                                // of its next draw, where the call that asks for it names none
    mutable InUse in_use{};                        // read by steps, changed by one caller

    // tables[table][start, ...) = blocks. Throws std::out_of_range for another table, or when start is beyond its end.
    void set_table(size_t table, size_t start, Ids blocks);
};

// A question about rows of logits; rows are counted over all rows of the step that go through the head.
struct Ask {
    enum class Kind { kDraw, kVerify, kReject, kPropose, kTop, kScore, kLogits };

    Kind kind;
    int row;
    std::shared_ptr<const Sequence> sequence;
    std::vector<NoiseKey> keys{};  // kDraw: one token each; kVerify: one key
    Report report{};
    int k = 0;                                // kTop, kScore: alternatives
    int32_t token = -1;                       // kScore
    std::vector<int32_t> nodes{}, parents{};  // kVerify: the tree whose rows follow `row`
    std::optional<double> mu{};               // kDraw, kVerify: mirostat's state
    std::shared_ptr<const std::vector<uint32_t>>
        allowed{};                        // bits of the ids that may come after its feed's rows; or null
    int place = 0;                        // of `row` among them: 0 = the last known token's
    std::vector<std::vector<float>> q{};  // kReject: what the chain was drawn from, or nothing
    bool block = false;                   // kReject: by the block rule
    std::vector<int32_t> path{};          // kDraw, kPropose: the draft tokens between the known ones and this row

    int last_row() const { return row + static_cast<int>(nodes.size()); }
};

// How a row of logits is combined with an amateur's of the same tokens; ops/contrast.py says what each means.
// kContrast: (1 + beta) * own - beta * amateur where the own logit is at least its best + ln(alpha), -inf elsewhere.
// The best is that of the ids that may come, so that one of them is left.
// kChow: the amateur's row where its best probability is at least 1 - alpha, else the own.
// kOpt: the amateur's where its best probability is at least the own best - alpha * total variation, else the own.
enum class Rule { kContrast, kChow, kOpt };

struct Combine {
    int row;
    std::vector<float> amateur;
    Rule rule;
    float alpha, beta;
    std::shared_ptr<const Sequence> sequence;
    std::vector<int32_t> path;  // as in an ask
    std::shared_ptr<const std::vector<uint32_t>> allowed;
    int place;
    std::string problem{};  // of the amateur's answer, which has no logits: all asks about the row get it
    bool failed = false;    // combining threw halfway: the row is neither the model's nor the combined one
};

struct Answer {
    std::vector<TokenReport> reports;
    std::vector<int32_t> path;  // kVerify
    std::vector<float> logits;  // kLogits; kPropose: what the token was drawn from
    std::string error;
    std::exception_ptr failure{};  // thrown while it was answered

    // What is wrong with it, one line; empty where nothing is.
    std::string problem() const;
};

// Built feed by feed, run by a Program, then read; `clear` makes it new and keeps its memory.
class Step {
public:
    InUse in_use;  // of who builds it, runs it or reads its answers; not looked at by its own functions

    void clear();

    // Known tokens [start, start + count) of a sequence, then the nodes of a draft tree (parents[i] < i, -1: the token
    // before KV index start + count). Nodes alone may lie beyond the known tokens. The last `logits` rows go through
    // the head. `full`: each node sees all nodes. Throws std::invalid_argument.
    void feed(std::shared_ptr<const Sequence> sequence, int start, int count, Ids nodes, Ids parents, int logits,
              bool full = false);

    // What may be drawn after the feed added last: a bit per token for its last known token and each node. All asks of
    // the feed heed it but scores and logits.
    void mask(std::vector<uint32_t> words) {
        allowed_ = std::make_shared<const std::vector<uint32_t>>(std::move(words));
    }

    // Of the feed added last; `row` counts from the first of its rows that go through the head. Each returns the number
    // of its (first) answer.
    int draw(int row, std::vector<NoiseKey> keys, Report report,
             std::optional<double> mu);  // at a node: after its path
    int verify(int row, NoiseKey key, Report report, std::optional<double> mu);
    // The draft must be a chain. `q`: a row for each of its tokens, or none.
    int reject(int row, NoiseKey key, std::vector<std::vector<float>> q, bool block, Report report);
    int propose(int row, NoiseKey key);
    int top(int row, int k);
    // Every row from `row` on scores the known token after it: one answer each, `count` of them.
    int score(int row, int k, int& count);
    int logits(int row);
    // Combines a row of logits with those that an amateur answered, before any ask reads it, and takes them from the
    // answer. An error of that answer becomes the error of the asks about the row. Throws std::invalid_argument for
    // another answer without logits.
    void combine(int row, Answer& amateur, Rule rule, float alpha, float beta);

    int rows() const { return static_cast<int>(ids_.size()); }
    std::span<const int32_t> ids() const { return ids_; }
    std::span<const int32_t> positions() const { return positions_; }
    // What attention needs, tables included; the spans last until the step is changed.
    StepFeeds feeds();
    std::span<const int32_t> head_rows() const { return head_rows_; }  // ascending
    std::vector<Ask>& asks() { return asks_; }
    std::vector<Answer>& answers() { return answers_; }
    std::vector<Combine>& combined() { return combined_; }  // rows ascending
    std::span<const std::shared_ptr<const Sequence>> sequences() const { return sequences_; }

    // What is run: layers [first_layer, last_layer) (-1: to the end), from the ids or from given hidden rows.
    int first_layer = 0, last_layer = -1;
    const float* hidden = nullptr;  // [rows][hidden size]; null: the step starts with its ids
    float* hidden_out = nullptr;    // [rows][hidden size] after the last layer; or null
    bool fill = false;              // of each layer K and V alone, of the hidden rows as they are
    std::vector<uint8_t> skips;     // per layer a bit for each sublayer that is left out; may be shorter
    std::vector<float*> taps;       // per tap of the program where its rows go, or null; may be shorter

private:
    // The place of row `row` of the last feed among all that go through the head, and of the `rows` - 1 after it.
    // Throws std::invalid_argument where they are not rows of logits of that feed.
    int head_row(int row, int rows = 1) const;
    int ask(Ask ask, int rows = 1);
    std::vector<int32_t> path_to(int row) const;  // the draft tokens between the last feed's known ones and a row of it
    int line_up(size_t table, std::vector<int32_t>& lines) const;

    std::vector<int32_t> ids_, positions_, row_start_{0}, kv_start_, known_, tables_, head_rows_;
    std::vector<int32_t> sources_, source_tables_;  // of the sequences; nothing where none has a source
    std::vector<uint64_t> masks_;
    std::vector<std::shared_ptr<const Sequence>> sequences_;
    // Of the last feed:
    std::vector<int32_t> nodes_, parents_;
    std::shared_ptr<const std::vector<uint32_t>> allowed_;
    int first_head_row_ = 0, last_known_ = 0;  // head rows: its first, and that of its last known token
    std::vector<Ask> asks_;
    std::vector<Answer> answers_;
    std::vector<Combine> combined_;
};

// Rows of logits and their block maxima, the first of which is head row `base`.
struct Logits {
    float* values;
    int64_t stride;
    const float* maxima;
    int64_t maxima_stride;
    int base;
    int vocab_size;
    std::span<const Combine> combined{};  // rows that were
};

// The blocks of kVocabBlock tokens in which a mask or the allowed ids let a token come, ascending, for head rows
// [first, last): no other is read. Empty, which stands for all of them, where a row is not limited or its whole row is
// wanted.
std::vector<int32_t> wanted_units(std::span<const Ask> asks, int first, int last, int vocab_size);

// Changes a row of logits and its block maxima; where that cannot be done, asks about the row fail.
void combine(Combine& pair, const Logits& logits, const SampleKernels& kernels) noexcept;

// Carries out one ask. Asks that share rows take turns: logits are changed for a while. What goes wrong, memory that is
// not there above all, is in the answer: the other requests of the step have theirs.
void answer(Sampler& sampler, const Ask& ask, Answer& out, const Logits& logits) noexcept;

}  // namespace headrace
