// A step's attention: who reads what, laid out once for all layers that see alike, and the work of its threads.
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

// The feeds of a step, as headrace.ops.context.Context has them.
struct StepFeeds {
    std::span<const int32_t> positions;  // [rows], rotary
    std::span<const uint64_t> masks;     // [rows]: a node's ancestors and itself, or all nodes; empty: there are none
    std::span<const int32_t> row_start;  // [feeds + 1]
    std::span<const int32_t> kv_start;   // [feeds]
    std::span<const int32_t> known;      // [feeds]; the rows after these are draft nodes
    std::span<const int32_t> tables;     // [feeds][table_width] block ids
    int table_width;
    std::span<const int32_t> sources{};        // [feeds] tokens of what each reads beside its own; empty: nobody does
    std::span<const int32_t> source_tables{};  // [feeds][source_width] block ids of their K and V
    int source_width = 0;
};

// What layers must share to share a layout.
struct AttentionView {
    int heads;
    int window;  // 0: none
    bool causal;
    bool source = false;  // every row sees all of its feed's source, and nothing is stored
    bool biased = false;  // scores depend on the distance, so a row's place matters and tiles are not joined
    bool shared = false;  // an earlier layer has stored what is read, and nothing is stored

    bool stores() const { return !source && !shared; }
    bool operator==(const AttentionView&) const = default;
};

// Lines as DistanceBias has them, of values [heads][2 * most + 1] by distance from -most to most. Throws
// std::invalid_argument for an even number of distances.
struct BiasLines {
    std::vector<float> values;
    int most = 0;
};
BiasLines bias_lines(const float* values, size_t heads, size_t distances);

struct AppendJob {
    int32_t feed, kv_head;
    int32_t first, last;  // rows of the feed
};

// One view's tiles and items, the longest first. Every item stands alone; what is cut is merged by the last of its
// tile. What several feeds hold in the same blocks, from beams, siblings or a common prefix, is one item's for all of
// them, so that it is read once; no bit depends on that (as in Hydragen, Juravsky et al. 2024, and without its
// rounding).
class AttentionLayout {
public:
    // Throws std::invalid_argument for heads that are no multiple of the KV heads.
    AttentionLayout(const AttentionView& view, const KVShape& kv);

    // `apart`: K and V are stored by `append` in any case.
    void build(const StepFeeds& step, const std::vector<AttentionFeed>& feeds, const std::vector<int32_t>& page_table,
               int threads, bool apart);
    const AttentionView& view() const { return view_; }
    // Whether items store K and V themselves, or there is nothing to store. If not, `append` must have run on all
    // threads, and a barrier, first.
    bool fused() const { return fused_; }
    int items() const { return static_cast<int>(items_.size()); }
    // Bytes of K and V that one layer reads, and its multiplications.
    std::pair<double, double> touches() const;

private:
    friend class AttentionStep;
    void see(const StepFeeds& step, const std::vector<AttentionFeed>& feeds);
    void tile(const std::vector<AttentionFeed>& feeds, bool apart);
    void share(const std::vector<AttentionFeed>& feeds, const std::vector<int32_t>& page_table);
    void cut(const std::vector<AttentionFeed>& feeds, int threads);
    void list(const std::vector<AttentionFeed>& feeds, const std::vector<int32_t>& page_table, int threads);
    int64_t cost(int tokens, int splits) const;
    int64_t cost(const AttentionItem& item) const { return cost(item.tokens, item.last_split - item.first_split); }
    int capacity() const;

    // A feed whose rows all see the splits [first, last); `pages`: where those of split 0 begin in the page table.
    struct Sharer {
        int32_t tile, tokens, pages;
        int first, last;
    };
    void together(std::span<Sharer> sharers, int split, const std::vector<int32_t>& page_table);
    void pool(std::span<const Sharer> sharers, int first, int last);

    const AttentionView view_;
    const KVShape kv_;
    bool built_ = false;  // for this step
    bool fused_ = false;
    std::vector<AttentionRow> rows_;
    std::vector<AttentionTile> tiles_;
    std::vector<AttentionItem> items_;
    std::vector<Sharer> sharers_;
    std::vector<AttentionItem> shared_;  // the splits that tiles read together, not cut yet
    std::vector<int32_t> members_;
    std::vector<float> partials_;
    std::unique_ptr<std::atomic<int>[]> done_;  // items of a tile that are done; 0 again when all are
    size_t done_size_ = 0;
    std::vector<std::vector<int32_t>> fetched_;  // [threads] page * heads + head, of the items that a thread will take
};

class AttentionStep {
public:
    // `threads` is how many will call append and attend.
    AttentionStep(const Kernels& kernels, const KVPool& pool, int threads)
        : kernels_(kernels), pool_(pool), threads_(threads) {}
    AttentionStep(const AttentionStep&) = delete;

    // Begins a step: earlier layouts are gone. The spans must outlive it. `apart`: no item stores K and V itself.
    // Throws std::out_of_range for a table that does not reach all rows, or all of the source, or a block outside the
    // pool; std::invalid_argument for masks that are neither a tree of 64 nodes nor all of them.
    void begin(const StepFeeds& step, bool apart = false);
    // One more than the highest block that a table of the step names.
    int blocks() const { return blocks_; }
    // The layout of a view, built at its first call in a step; not from several threads. Throws std::invalid_argument
    // where it reads sources, and a feed has none.
    AttentionLayout& layout(const AttentionView& view);
    // Lists the jobs that store K and V of all rows, for a layer that does no more; not from several threads. A layout
    // that is not fused has them listed.
    void list_appends();

    // Fills what the step knows into the task of one layer; the caller sets the rest (q, k, v, norms, rope, out, ...).
    void prepare(AttentionLayout& layout, int layer, AttentionTask& task) const;
    // The same for storing alone.
    void prepare(int layer, AttentionTask& task) const;
    // A thread's part of storing K and V.
    void append(const AttentionTask& task, int thread, float* scratch) const;
    // A thread's part of the attention; `next` is 0 before, one for all threads.
    void attend(const AttentionLayout& layout, const AttentionTask& task, std::atomic<int>& next, float* scratch) const;
    // The same one by one, for callers that deal the work out themselves: append jobs, then items, in any order by any
    // thread; each item once. `after`: the item that the thread takes next, or -1.
    int appends() const { return static_cast<int>(appends_.size()); }
    void append_job(const AttentionTask& task, int job, float* scratch) const;
    void attend_item(const AttentionLayout& layout, const AttentionTask& task, int item, int after,
                     float* scratch) const;
    // K and V that a thread's items read in a layer of this layout, to be fetched beforehand: nothing where there is
    // more than a cache keeps, or where few rows leave no time for it.
    FetchList fetch_list(const AttentionLayout& layout, int layer, int thread) const;
    size_t scratch_floats(int heads) const { return attention_scratch_floats(pool_.shape(), heads); }

private:
    int32_t add_pages(std::span<const int32_t> table, int tokens);

    const Kernels& kernels_;
    const KVPool& pool_;
    const int threads_;
    StepFeeds step_{};
    std::vector<AttentionFeed> feeds_;
    std::vector<AttentionFeed> readers_;  // the feeds by what they read: kv_start tokens of a source, and its pages
    std::vector<int32_t> page_table_;
    std::vector<AppendJob> appends_;
    int blocks_ = 0;
    bool apart_ = false;
    std::vector<std::unique_ptr<AttentionLayout>> layouts_;  // kept from step to step for their memory
};

}  // namespace headrace
