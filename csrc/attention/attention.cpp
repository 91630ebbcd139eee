#include "attention/attention.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string>

namespace headrace {
namespace {

constexpr int kAppendRows = 64;           // about the number of rows of an append job
constexpr int kPiecesAThread = 4;         // items per thread when tiles must be cut
constexpr int64_t kFetchBytes = 8 << 20;  // most K and V of a layer that is prefetched before its attention begins
constexpr size_t kFetchRows = 16;         // fewer rows: linear layers are memory-bound, no time to prefetch
constexpr int kFetchCost = 6;             // cost of reading a token's K and V, in rows multiplied with it
constexpr int kLast = std::numeric_limits<int>::max() - kPageTokens;  // most tokens, so that 32 bits count them

uint64_t bits_below(int n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

float* aligned(std::vector<float>& memory) {
    const auto at = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (64 - at % 64) % 64 / sizeof(float);
}

void check_feed(const StepFeeds& step, int first, int rows, int start, int known) {
    if (rows < 0 || start < 0 || known < 0 || known > rows || start > kLast - rows ||
        static_cast<size_t>(first) + static_cast<size_t>(rows) > step.positions.size()) {
        throw std::out_of_range("a feed's rows do not fit the step");
    }
    const int nodes = rows - known;
    if (nodes > 64) throw std::invalid_argument("a draft has at most 64 nodes, not " + std::to_string(nodes));
    if (nodes && step.masks.size() < step.positions.size()) throw std::invalid_argument("draft nodes need masks");
    for (int node = 0; node < nodes; ++node) {
        const uint64_t mask = step.masks[static_cast<size_t>(first + known + node)];
        if (static_cast<int>(std::bit_width(mask)) != node + 1 && mask != bits_below(nodes)) {
            throw std::invalid_argument("a node's mask names itself and nodes before it, or all nodes");
        }
    }
}

}  // namespace

BiasLines bias_lines(const float* values, size_t heads, size_t distances) {
    if (distances % 2 == 0 || distances > static_cast<size_t>(kLast) / 4)
        throw std::invalid_argument("distances go from -d to d: their number is odd");
    BiasLines lines{{}, static_cast<int>(distances / 2)};
    for (size_t head = 0; head < heads; ++head) {
        const float* own = values + head * distances;
        for (int i = 0; i < bias_width(lines.most); ++i) {
            const int distance = std::clamp(i - lines.most - kPageTokens, -lines.most, lines.most);
            lines.values.push_back(own[distance + lines.most]);
        }
    }
    return lines;
}

bool AttentionView::fits(const KVShape& kv) const {
    if (heads < 1 || group < 0) return false;
    if (group == 0) return skipped == 0 && heads % kv.heads == 0;
    return skipped >= 0 && skipped < group && (skipped + heads + group - 1) / group == kv.heads;
}

AttentionLayout::AttentionLayout(const AttentionView& view, const KVShape& kv)
    : view_(view), kv_(kv), group_(view.group_of(kv)) {
    if (!view.fits(kv)) {
        throw std::invalid_argument("attention has a multiple of the " + std::to_string(kv.heads) + " KV heads, not " +
                                    std::to_string(view.heads));
    }
    if (view.window < 0) throw std::invalid_argument("a window is 0 (none) or more tokens");
}

// Computes the KV range of every row (AttentionRow). In a row's own sequence of tokens, positions and KV indices are
// the same, so a window can be counted in either.
void AttentionLayout::see(const StepFeeds& step, const std::vector<AttentionFeed>& feeds) {
    rows_.resize(step.positions.size());
    for (const AttentionFeed& feed : feeds) {
        const int known = feed.first_node - feed.kv_start;
        for (int i = 0; i < feed.rows; ++i) {
            const size_t at = static_cast<size_t>(feed.row + i);
            if (view_.source) {
                rows_[at] = {0, feed.kv_start, 0};
                continue;
            }
            AttentionRow row{0, feed.kv_start + i + 1, 0};
            if (i >= known) {
                const int depth = std::popcount(step.masks[at]);
                row.end = feed.first_node + depth;
                if (step.masks[at] != bits_below(depth)) row.path = step.masks[at];
            }
            const int own = std::min(row.end, feed.kv_start + i + 1);  // a node that sees all nodes has a larger end
            if (!view_.causal) row.end = feed.kv_start + feed.rows;
            if (view_.window) {
                row.begin = std::max(0, own - view_.window);
                const int64_t last = int64_t{own} - 1 + view_.window;
                row.end = static_cast<int32_t>(std::min<int64_t>(row.end, last));
            }
            rows_[at] = row;
        }
    }
}

void AttentionLayout::tile(const std::vector<AttentionFeed>& feeds, bool apart) {
    tiles_.clear();
    const int tokens = capacity();
    const auto fits = [&](const AttentionFeed& feed) { return feed.rows <= tokens; };
    fused_ = !view_.stores() || (!apart && std::all_of(feeds.begin(), feeds.end(), fits));
    for (int f = 0; f < static_cast<int>(feeds.size()); ++f) {
        const AttentionFeed& feed = feeds[static_cast<size_t>(f)];
        for (int kv_head = 0; kv_head < kv_.heads; ++kv_head) {
            const int head = first_head(kv_head), share = first_head(kv_head + 1) - head;
            for (int first = 0; first < feed.rows; first += tokens) {
                AttentionTile tile{f, kv_head, head, share, feed.row + first, std::min(tokens, feed.rows - first), 0,
                                   0, 0,       1,    0};
                int begin = std::numeric_limits<int>::max(), end = 0;
                for (int i = 0; i < tile.tokens; ++i) {
                    const AttentionRow& row = rows_[static_cast<size_t>(tile.row + i)];
                    if (row.begin < row.end) begin = std::min(begin, row.begin), end = std::max(end, row.end);
                }
                if (begin < end) tile.first_split = begin / kSplit, tile.last_split = (end - 1) / kSplit + 1;
                tile.own_split = tile.first_split;
                tiles_.push_back(tile);
            }
        }
    }
}

// Most tokens of a tile.
int AttentionLayout::capacity() const { return tile_rows(group_) / group_; }

// The first query head of a KV head.
int AttentionLayout::first_head(int kv_head) const {
    return std::clamp(kv_head * group_ - view_.skipped, 0, view_.heads);
}

// Finds feeds whose rows all see the same blocks. Feeds of many rows are left out: they already read a page for many
// rows at once.
void AttentionLayout::share(const std::vector<AttentionFeed>& feeds, const std::vector<int32_t>& page_table) {
    sharers_.clear();
    shared_.clear();
    members_.clear();
    for (size_t t = 0; t < tiles_.size() && !view_.biased; ++t) {
        const AttentionTile& tile = tiles_[t];
        const AttentionFeed& feed = feeds[static_cast<size_t>(tile.feed)];
        if (tile.kv_head != 0 || 2 * feed.rows > capacity()) continue;  // the others have one tile per head
        int begin = 0, end = feed.kv_start;
        for (int i = 0; i < feed.rows; ++i) {
            const AttentionRow& row = rows_[static_cast<size_t>(tile.row + i)];
            begin = std::max(begin, row.begin), end = std::min(end, row.end);
        }
        const Sharer sharer{static_cast<int32_t>(t), feed.rows, feed.pages, (begin + kSplit - 1) / kSplit,
                            end / kSplit};
        if (sharer.first < sharer.last) sharers_.push_back(sharer);
    }
    std::sort(sharers_.begin(), sharers_.end(), [](const Sharer& a, const Sharer& b) { return a.first < b.first; });
    for (size_t at = 0, end; at < sharers_.size(); at = end) {
        for (end = at + 1; end < sharers_.size() && sharers_[end].first == sharers_[at].first;) ++end;
        together({sharers_.data() + at, end - at}, sharers_[at].first, page_table);
    }
}

// Groups feeds that share all splits before `split` by the splits from `split` on that they also share.
void AttentionLayout::together(std::span<Sharer> sharers, int split, const std::vector<int32_t>& page_table) {
    constexpr int kPages = kSplit / kPageTokens;
    const auto compare = [&](const Sharer& a, const Sharer& b, int at) {
        if (at >= a.last || at >= b.last) return (at >= a.last) - (at >= b.last);
        const int32_t *x = page_table.data() + a.pages + at * kPages, *y = page_table.data() + b.pages + at * kPages;
        const auto [left, right] = std::mismatch(x, x + kPages, y);
        return left == x + kPages ? 0 : *left < *right ? -1 : 1;
    };
    std::stable_sort(sharers.begin(), sharers.end(),
                     [&](const Sharer& a, const Sharer& b) { return compare(a, b, split) < 0; });
    for (size_t at = 0, end; at < sharers.size() && split < sharers[at].last; at = end) {
        for (end = at + 1; end < sharers.size() && compare(sharers[at], sharers[end], split) == 0;) ++end;
        const std::span<Sharer> same = sharers.subspan(at, end - at);
        if (same.size() == 1) continue;
        int last = split + 1;
        const auto shares = [&](const Sharer& sharer) {
            return last < sharer.last && compare(same[0], sharer, last) == 0;
        };
        while (std::all_of(same.begin(), same.end(), shares)) ++last;
        pool(same, split, last);
        together(same, last, page_table);
    }
}

// Adds items for the splits [first, last) of all `sharers`, divided into as many items as their rows need.
void AttentionLayout::pool(std::span<const Sharer> sharers, int first, int last) {
    int tokens = 0;
    for (const Sharer& sharer : sharers) tokens += sharer.tokens;
    const int parts = (tokens + capacity() - 1) / capacity(), most = (tokens + parts - 1) / parts;
    for (size_t at = 0, end; at < sharers.size(); at = end) {
        int count = 0;
        for (end = at; end < sharers.size() && (end == at || count + sharers[end].tokens <= most); ++end)
            count += sharers[end].tokens;
        for (int head = 0; head < kv_.heads; ++head) {
            shared_.push_back({sharers[at].tile + head, first, last, false, count,
                               static_cast<int32_t>(members_.size()), static_cast<int32_t>(end - at)});
            for (size_t m = at; m < end; ++m) {
                members_.push_back(sharers[m].tile + head);
                tiles_[static_cast<size_t>(members_.back())].own_split = last;
            }
        }
    }
}

int64_t AttentionLayout::cost(int tokens, int splits) const { return int64_t{splits} * (tokens * group_ + kFetchCost); }

// Cuts tiles at split boundaries if one of them is too large a part of one thread's work.
void AttentionLayout::cut(const std::vector<AttentionFeed>& feeds, int threads) {
    int64_t all = 0;
    for (const AttentionTile& tile : tiles_) all += cost(tile.tokens, tile.last_split - tile.own_split);
    for (const AttentionItem& shared : shared_) all += cost(shared);
    const int64_t most = std::max<int64_t>(1, threads == 1 ? all : all / (threads * kPiecesAThread) + 1);
    // Number of splits per piece.
    const auto step_of = [&](int tokens, int splits) {
        const int pieces = static_cast<int>(std::min<int64_t>(splits, cost(tokens, splits) / most + 1));
        return pieces > 1 ? (splits + pieces - 1) / pieces : splits;
    };
    size_t partials = 0;
    items_.clear();
    for (AttentionTile& tile : tiles_) tile.items = 0;
    for (AttentionItem item : shared_) {
        const int last = item.last_split, step = step_of(item.tokens, last - item.first_split);
        for (; item.first_split < last; item.first_split = item.last_split) {
            item.last_split = std::min(item.first_split + step, last);
            items_.push_back(item);
            for (int m = 0; m < item.members; ++m)
                ++tiles_[static_cast<size_t>(members_[static_cast<size_t>(item.first_member + m)])].items;
        }
    }
    for (int t = 0; t < static_cast<int>(tiles_.size()); ++t) {
        AttentionTile& tile = tiles_[static_cast<size_t>(t)];
        const AttentionFeed& feed = feeds[static_cast<size_t>(tile.feed)];
        const int splits = tile.last_split - tile.first_split;
        const int step = step_of(tile.tokens, tile.last_split - tile.own_split);
        // The item that stores K and V must also be the one that reads them: other items may run before it.
        const bool stores = fused_ && view_.stores();
        const int tail = stores ? feed.kv_start / kSplit : tile.last_split;
        int first = tile.own_split;
        do {
            int last = std::min(first + step, tile.last_split);
            if (last > tail) last = tile.last_split;
            items_.push_back({t, first, last, stores && last == tile.last_split, tile.tokens, 0, 0});
            ++tile.items;
            first = last;
        } while (first < tile.last_split);
        if (tile.items == 1) continue;
        tile.partial = static_cast<int64_t>(partials);
        partials += static_cast<size_t>(splits) * state_floats(kv_, tile.tokens * tile.share);
    }
    if (partials_.size() < partials + 16) partials_.resize(partials + 16);
    std::stable_sort(items_.begin(), items_.end(),
                     [&](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
}

// Lists the pages that each thread's items read, with the distribution of Turn::deal.
void AttentionLayout::list(const std::vector<AttentionFeed>& feeds, const std::vector<int32_t>& page_table,
                           int threads) {
    fetched_.resize(static_cast<size_t>(threads));
    for (auto& pages : fetched_) pages.clear();
    if (rows_.size() < kFetchRows || static_cast<int64_t>(page_table.size()) * kv_.page_offset(1, 0) > kFetchBytes)
        return;
    for (size_t i = 0; i < items_.size(); ++i) {
        const AttentionItem& item = items_[i];
        const AttentionTile& tile = tiles_[static_cast<size_t>(item.tile)];
        const int end = std::min(rows_[static_cast<size_t>(tile.row + tile.tokens - 1)].end, item.last_split * kSplit);
        const int begin = std::max(rows_[static_cast<size_t>(tile.row)].begin, item.first_split * kSplit);
        const auto* table = page_table.data() + feeds[static_cast<size_t>(tile.feed)].pages;
        for (int page = begin / kPageTokens; page * kPageTokens < end; ++page) {
            fetched_[i % static_cast<size_t>(threads)].push_back(table[page] * kv_.heads + tile.kv_head);
        }
    }
}

std::pair<double, double> AttentionLayout::touches() const {
    double pages = 0, keys = 0;
    for (const AttentionItem& shared : shared_)
        pages -= (shared.members - 1.0) * (shared.last_split - shared.first_split) * kSplit / kPageTokens;
    for (const AttentionTile& tile : tiles_) {
        int begin = std::numeric_limits<int>::max(), end = 0;
        for (int i = 0; i < tile.tokens; ++i) {
            const AttentionRow& row = rows_[static_cast<size_t>(tile.row + i)];
            keys += tile.share * std::max(0, row.end - row.begin);
            if (row.begin < row.end) begin = std::min(begin, row.begin), end = std::max(end, row.end);
        }
        if (begin < end) pages += (end - 1) / kPageTokens - begin / kPageTokens + 1;
    }
    return {pages * kv_.page_bytes, keys * kv_.dim * 2};
}

void AttentionLayout::build(const StepFeeds& step, const std::vector<AttentionFeed>& feeds,
                            const std::vector<int32_t>& page_table, int threads, bool apart) {
    see(step, feeds);
    tile(feeds, apart);
    share(feeds, page_table);
    cut(feeds, threads);
    list(feeds, page_table, threads);
    if (done_size_ < tiles_.size()) {
        done_size_ = tiles_.size();
        done_ = std::make_unique<std::atomic<int>[]>(done_size_);
    }
    for (size_t i = 0; i < tiles_.size(); ++i) done_[i].store(0, std::memory_order_relaxed);  // a step may have failed
    built_ = true;
}

void AttentionStep::begin(const StepFeeds& step, bool apart) {
    step_ = step;
    apart_ = apart;
    feeds_.clear();
    readers_.clear();
    appends_.clear();
    page_table_.clear();
    blocks_ = 0;
    for (auto& layout : layouts_) layout->built_ = false;
    for (size_t f = 0; f < step.kv_start.size(); ++f) {
        const int first = step.row_start[f], rows = step.row_start[f + 1] - first, start = step.kv_start[f];
        check_feed(step, first, rows, start, step.known[f]);
        const size_t width = static_cast<size_t>(step.table_width);
        const int32_t pages = add_pages(step.tables.subspan(f * width, width), start + rows,
                                        reach_ ? std::max(0, start + 1 - reach_) : 0);
        feeds_.push_back({first, rows, start, start + step.known[f], pages});
    }
    for (size_t f = 0; f < step.sources.size(); ++f) {
        const int tokens = step.sources[f];
        if (tokens < 0 || tokens > kLast) throw std::out_of_range("a source has a number of tokens");
        const size_t width = static_cast<size_t>(step.source_width);
        const int32_t pages = add_pages(step.source_tables.subspan(f * width, width), tokens);
        readers_.push_back({feeds_[f].row, feeds_[f].rows, tokens, tokens, pages});
    }
}

// Appends the pages of a table's first `tokens` tokens to the page table; returns the index of the first page. No row
// sees a token before `first`, so the pages that lie wholly before it may be in no block.
int32_t AttentionStep::add_pages(std::span<const int32_t> table, int tokens, int first) {
    const auto begin = static_cast<int32_t>(page_table_.size());
    const int per_block = pool_.pages_per_block(), pages = (tokens + kPageTokens - 1) / kPageTokens;
    if (static_cast<size_t>((pages + per_block - 1) / per_block) > table.size())
        throw std::out_of_range("a feed is longer than its table");
    page_table_.resize(page_table_.size() + static_cast<size_t>(first / kPageTokens), 0);
    for (int page = first / kPageTokens; page < pages; ++page) {
        const int32_t block = table[static_cast<size_t>(page / per_block)];
        if (block < 0 || block >= pool_.num_blocks()) throw std::out_of_range("a table names a block outside the pool");
        page_table_.push_back(block * per_block + page % per_block);
        blocks_ = std::max(blocks_, block + 1);
    }
    return begin;
}

AttentionLayout& AttentionStep::layout(const AttentionView& view) {
    auto found = std::find_if(layouts_.begin(), layouts_.end(), [&](const auto& each) { return each->view() == view; });
    if (found == layouts_.end()) found = layouts_.insert(found, std::make_unique<AttentionLayout>(view, pool_.shape()));
    AttentionLayout& layout = **found;
    if (layout.built_) return layout;
    const auto reads = [](const AttentionFeed& feed) { return feed.kv_start > 0; };
    if (view.source && (readers_.size() < feeds_.size() || !std::all_of(readers_.begin(), readers_.end(), reads)))
        throw std::invalid_argument("attention reads a source, and a feed has none");
    layout.build(step_, view.source ? readers_ : feeds_, page_table_, threads_, apart_);
    if (!layout.fused()) list_appends();
    return layout;
}

void AttentionStep::list_appends() {
    if (!appends_.empty()) return;
    for (int f = 0; f < static_cast<int>(feeds_.size()); ++f) {
        const AttentionFeed& feed = feeds_[static_cast<size_t>(f)];
        for (int head = 0; head < pool_.shape().heads; ++head) {
            for (int first = 0; first < feed.rows;) {
                const int whole = (feed.kv_start + first + kAppendRows) / kPageTokens * kPageTokens - feed.kv_start;
                const int last = std::min(whole, feed.rows);
                appends_.push_back({f, head, first, last});
                first = last;
            }
        }
    }
}

void AttentionStep::prepare(int layer, AttentionTask& task) const {
    task.kv = pool_.shape();
    task.pool = pool_.layer(layer);
    task.feeds = feeds_.data();
    task.positions = step_.positions.data();
    task.page_table = page_table_.data();
}

void AttentionStep::prepare(AttentionLayout& layout, int layer, AttentionTask& task) const {
    prepare(layer, task);
    task.heads = layout.view_.heads;
    if (layout.view_.source) task.feeds = readers_.data();
    task.tiles = layout.tiles_.data();
    task.members = layout.members_.data();
    task.rows = layout.rows_.data();
    task.partials = aligned(layout.partials_);
}

FetchList AttentionStep::fetch_list(const AttentionLayout& layout, int layer, int thread) const {
    FetchList list{};
    if (layer >= pool_.layers()) return list;
    const std::vector<int32_t>& pages = layout.fetched_[static_cast<size_t>(thread)];
    list.base = pool_.layer(layer);
    list.pages = pages.data();
    list.page_bytes = pool_.shape().page_bytes;
    list.count = static_cast<int32_t>(pages.size());
    list.step = 1;
    return list;
}

void AttentionStep::append_job(const AttentionTask& task, int job, float* scratch) const {
    const AppendJob& work = appends_[static_cast<size_t>(job)];
    kernels_.attention->append(task, work.feed, work.kv_head, work.first, work.last, scratch);
}

void AttentionStep::attend_item(const AttentionLayout& layout, const AttentionTask& task, int item, int after,
                                float* scratch) const {
    const AttentionItem& work = layout.items_[static_cast<size_t>(item)];
    const AttentionItem* next = after < 0 ? nullptr : &layout.items_[static_cast<size_t>(after)];
    kernels_.attention->attend(task, work, next, scratch);
    const int32_t* members = work.members ? task.members + work.first_member : &work.tile;
    for (int m = 0; m < std::max(1, work.members); ++m) {
        const AttentionTile& tile = task.tiles[members[m]];
        if (tile.items == 1) continue;
        std::atomic<int>& done = layout.done_[static_cast<size_t>(members[m])];
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < tile.items) continue;
        done.store(0, std::memory_order_relaxed);
        kernels_.attention->merge(task, tile, scratch);
    }
}

void AttentionStep::append(const AttentionTask& task, int thread, float* scratch) const {
    for (int job = thread; job < appends(); job += threads_) append_job(task, job, scratch);
}

void AttentionStep::attend(const AttentionLayout& layout, const AttentionTask& task, std::atomic<int>& next,
                           float* scratch) const {
    for (;;) {
        const int item = next.fetch_add(1, std::memory_order_relaxed);
        if (item >= layout.items()) return;
        const int after = item + threads_ < layout.items() ? item + threads_ : -1;
        attend_item(layout, task, item, after, scratch);
    }
}

}  // namespace headrace
