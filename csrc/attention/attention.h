// Attention of a step: a layout of tiles and items, built once for all layers with the same view, and the work of each
// thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/kernels.h"
#include "attention/kv_pool.h"
#include "linear/kernels.h"
#include "system/kernels.h"

namespace headrace {

// The feeds of a step, in the form of headrace.ops.context.Context.
struct StepFeeds {
    std::span<const int32_t> positions;  // [rows], rotary
    std::span<const uint64_t> masks;     // [rows]: bits of a node's ancestors and itself, or of all nodes; or empty
    std::span<const int32_t> row_start;  // [feeds + 1]
    std::span<const int32_t> kv_start;   // [feeds]
    std::span<const int32_t> known;      // [feeds]; the rows after these are draft nodes
    std::span<const int32_t> tables;     // [feeds][table_width] block ids
    int table_width;
    std::span<const int32_t> sources{};        // [feeds] number of tokens of the source; empty: no feed has a source
    std::span<const int32_t> source_tables{};  // [feeds][source_width] block ids of the sources' K and V
    int source_width = 0;
    std::span<const int32_t> window_tables{};  // [feeds][window_width] block ids in the pool of the window layers
    int window_width = 0;

    // The same feeds with `window_tables` as their tables.
    StepFeeds in_windows() const { return {positions, masks, row_start, kv_start, known, window_tables, window_width}; }
};

// Layers with equal views share a layout.
struct AttentionView {
    int heads;
    int window;  // 0: none
    bool causal;
    bool source = false;  // cross-attention: every row sees all of its feed's source; stores no K/V
    bool biased = false;  // scores depend on the distance, so tiles of different feeds are not read together
    bool shared = false;  // reads the K/V that an earlier layer stored; stores no K/V
    // Query heads of one KV head; 0: heads / KV heads. On a rank, the first KV head may have fewer of them, because its
    // first `skipped` query heads belong to the rank before, and the last KV head may have fewer.
    int group = 0;
    int skipped = 0;

    bool stores() const { return !source && !shared; }
    int group_of(const KVShape& kv) const { return group ? group : heads / kv.heads; }
    // Whether the query heads cover the KV heads.
    bool fits(const KVShape& kv) const;
    bool operator==(const AttentionView&) const = default;
};

// Builds DistanceBias::lines from values [heads][distances], distances = 2 * most + 1, for distances from -most to
// most. Throws std::invalid_argument for an even number of distances.
struct BiasLines {
    std::vector<float> values;
    int most = 0;
};
BiasLines bias_lines(const float* values, size_t heads, size_t distances);

struct AppendJob {
    int32_t feed, kv_head;
    int32_t first, last;  // rows of the feed
};

// Tiles and items of one view, the longest item first. Items are independent; the thread that finishes the last item of
// a cut tile merges the tile's partial results. If several feeds hold the same blocks (beams, siblings, a common
// prefix), one item reads these blocks for all of them. This is Hydragen (Juravsky et al. 2024), but with the same bits
// as without sharing.
class AttentionLayout {
public:
    // Throws std::invalid_argument unless the view fits the KV heads.
    AttentionLayout(const AttentionView& view, const KVShape& kv);

    // `apart`: K and V are always stored by append jobs, never by items.
    void build(const StepFeeds& step, const std::vector<AttentionFeed>& feeds, const std::vector<int32_t>& page_table,
               int threads, bool apart);
    const AttentionView& view() const { return view_; }
    // Whether the items store K and V themselves or there is nothing to store. Otherwise all append jobs must be done
    // before the first item runs.
    bool fused() const { return fused_; }
    int items() const { return static_cast<int>(items_.size()); }
    // Bytes of K and V that one layer reads, and its multiply-accumulates.
    std::pair<double, double> touches() const;

private:
    friend class AttentionStep;
    void see(const StepFeeds& step, const std::vector<AttentionFeed>& feeds);
    void tile(const std::vector<AttentionFeed>& feeds, bool apart);
    void share(const std::vector<AttentionFeed>& feeds, const std::vector<int32_t>& page_table);
    void cut(const std::vector<AttentionFeed>& feeds, int threads);
    void list(const std::vector<AttentionFeed>& feeds, const std::vector<int32_t>& page_table, int threads);
    int first_head(int kv_head) const;
    int64_t cost(int tokens, int splits) const;
    int64_t cost(const AttentionItem& item) const { return cost(item.tokens, item.last_split - item.first_split); }
    int capacity() const;

    // A feed whose rows all see the splits [first, last). `pages`: index of split 0 in the page table.
    struct Sharer {
        int32_t tile, tokens, pages;
        int first, last;
    };
    void together(std::span<Sharer> sharers, int split, const std::vector<int32_t>& page_table);
    void pool(std::span<const Sharer> sharers, int first, int last);

    const AttentionView view_;
    const KVShape kv_;
    const int group_;     // AttentionView::group_of
    bool built_ = false;  // in this step
    bool fused_ = false;
    std::vector<AttentionRow> rows_;
    std::vector<AttentionTile> tiles_;
    std::vector<AttentionItem> items_;
    std::vector<Sharer> sharers_;
    std::vector<AttentionItem> shared_;  // items with members, before `cut`
    std::vector<int32_t> members_;
    std::vector<float> partials_;
    std::unique_ptr<std::atomic<int>[]> done_;  // [tiles] finished items; reset to 0 by the last one
    size_t done_size_ = 0;
    std::vector<std::vector<int32_t>> fetched_;  // [threads] page * heads + head of the pages to prefetch
};

class AttentionStep {
public:
    // `threads`: number of threads that call append and attend.
    AttentionStep(const Kernels& kernels, const KVPool& pool, int threads)
        : kernels_(kernels), pool_(pool), threads_(threads) {}
    AttentionStep(const AttentionStep&) = delete;

    // Begins a step and invalidates the layouts of the step before. The spans must outlive the step. `apart`: no item
    // stores K and V itself. Throws std::out_of_range if a table does not cover all tokens of its feed or source, or
    // names a block outside the pool; std::invalid_argument for more than 64 draft nodes or invalid masks.
    // Blocks that lie wholly before `reach` are not looked at.
    void begin(const StepFeeds& step, bool apart = false);
    // The layers see at most the last `window` tokens; 0: all tokens.
    void set_reach(int window) { reach_ = window; }
    int reach() const { return reach_; }
    // Highest block id in the tables of the step, plus 1.
    int blocks() const { return blocks_; }
    // The layout of a view, built at the first call in a step. Not thread-safe. Throws std::invalid_argument if the
    // view reads sources and a feed has none.
    AttentionLayout& layout(const AttentionView& view);
    // Lists the append jobs, for layers that only store K and V. `layout` does so for layouts that are not fused. Not
    // thread-safe.
    void list_appends();

    // Sets the fields of one layer's task that the step determines. The caller sets the others (q, k, v, norms, rope,
    // out, ...).
    void prepare(AttentionLayout& layout, int layer, AttentionTask& task) const;
    // The same for a layer that only stores K and V.
    void prepare(int layer, AttentionTask& task) const;
    // Runs one thread's append jobs.
    void append(const AttentionTask& task, int thread, float* scratch) const;
    // Runs items until none remains. All threads share `next`, which starts at 0.
    void attend(const AttentionLayout& layout, const AttentionTask& task, std::atomic<int>& next, float* scratch) const;
    // For callers that distribute the work themselves: run each append job once, then each item once, in any order on
    // any thread. `after`: the item that the thread will probably take next, or -1.
    int appends() const { return static_cast<int>(appends_.size()); }
    void append_job(const AttentionTask& task, int job, float* scratch) const;
    void attend_item(const AttentionLayout& layout, const AttentionTask& task, int item, int after,
                     float* scratch) const;
    // K and V that a thread's items read in this layer, for the linear layers before it to prefetch. Empty if the K and
    // V exceed the cache (kFetchBytes), or if a step of few rows has no time to prefetch.
    FetchList fetch_list(const AttentionLayout& layout, int layer, int thread) const;
    // For layers with `group` query heads per KV head, or layers that only store K and V.
    size_t scratch_floats(int group = 1) const { return attention_scratch_floats(pool_.shape(), group); }

private:
    int32_t add_pages(std::span<const int32_t> table, int tokens, int first = 0);

    const Kernels& kernels_;
    const KVPool& pool_;
    const int threads_;
    int reach_ = 0;
    StepFeeds step_{};
    std::vector<AttentionFeed> feeds_;
    std::vector<AttentionFeed> readers_;  // the feeds for cross-attention: kv_start is the number of source tokens
    std::vector<int32_t> page_table_;
    std::vector<AppendJob> appends_;
    int blocks_ = 0;
    bool apart_ = false;
    std::vector<std::unique_ptr<AttentionLayout>> layouts_;  // reused from step to step to keep their memory
};

}  // namespace headrace
