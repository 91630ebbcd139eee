// Attention kernels: a tile of rows over its splits, chunk by chunk. See attention/kernels.h for row invariance.
#pragma once

#include "attention/kernels.h"
#include "attention/kv_page.inl"
#include "attention/pools.inl"
#include "attention/prefetch.inl"
#include "linear/a8.inl"
#include "vec/softmax.h"

namespace headrace::HEADRACE_ISA {

constexpr float kLowest = -1e30f;  // initial maximum of a row; finite, so that differences are not NaN
constexpr float kUnseen = -__builtin_inff();
constexpr float kLog2E = 1.44269504f;

// Running result of a tile's rows: weight sums in 16 lanes, weighted values, and the maxima (times log2 e).
struct State {
    float* data;
    int rows, padded;

    int stride() const { return padded + 16; }
    float* sums(int r) const { return data + (int64_t)r * stride(); }
    float* values(int r) const { return sums(r) + 16; }
    float* row_max() const { return sums(rows); }
};

// The inputs and the running result of one item.
struct Tile {
    const AttentionTask& task;
    const AttentionFeed& feed;
    const AttentionTile& tile;
    int share;       // query heads of the KV head
    const float* q;  // [rows][q_stride], from Pool::prepare
    int q_stride;
    Upcoming upcoming;
    int begin_page, end_page;  // pages of the item
    State state;               // of the current split; row r is query head r % share of token r / share

    mutable int configured = 0;  // kTiles: rows of the AMX shapes in use

    const AttentionRow& row(int r) const { return task.rows[tile.row + r / share]; }
};

HEADRACE_INLINE uint32_t bits_below(int n) { return n <= 0 ? 0 : n >= kPageTokens ? 0xffff : (1u << n) - 1; }

// Bits of the tokens that a row sees in the page that begins at KV index `start`.
HEADRACE_INLINE uint32_t seen_in_page(const AttentionRow& row, int start) {
    return bits_below(row.end - start) & ~bits_below(row.begin - start);
}

struct ChunkView {
    int start;  // KV index of the chunk's first page
    bool open;  // every row sees all of the chunk
};

// The bias of a row's scores for the page that begins at KV index `start`, or null.
HEADRACE_INLINE const float* bias_of(const Tile& tile, int r, int start) {
    const AttentionTask& task = tile.task;
    if (!task.bias.lines) return nullptr;
    const int head = tile.tile.head + r % tile.share, most = task.bias.most,
              distance = start - task.positions[tile.tile.row + r / tile.share], first = -most - kPageTokens;
    const int held = distance < first ? first : distance > most ? most : distance;
    return task.bias.lines + (int64_t)head * bias_width(most) + (held - first);
}

// Whether the softmax takes the products of q and k unchanged: no token scales, soft cap or distance bias.
template <class Pool>
HEADRACE_INLINE bool plain_scores(const AttentionTask& task) {
    return !Pool::kScaled && task.softcap == 0.0f && !task.bias.lines;
}

// Prepares a row's scores for the softmax: scales of the tokens, soft cap, distance bias, -inf for tokens that the row
// does not see. Returns the largest score.
template <class Pool>
HEADRACE_INLINE float mask_scores(const Tile& tile, int r, ChunkView view, float* scores, const ChunkPages& chunk) {
    const AttentionTask& task = tile.task;
    const bool plain = plain_scores<Pool>(task);
    const AttentionRow row = tile.row(r);
    Lanes16 largest;
    for (int p = 0; p < kParts; ++p) largest.part[p] = set_f32(kUnseen);
    for (int b = 0; b < chunk.count; ++b) {
        const int start = view.start + b * kPageTokens;
        const bool whole = view.open || (row.begin <= start && start + kPageTokens <= row.end);
        if (plain && whole) {
            for (int p = 0; p < kParts; ++p)
                largest.part[p] = max(largest.part[p], load_f32(scores + b * kPageTokens + p * kLanes));
            continue;
        }
        const uint32_t seen = whole ? 0xffff : seen_in_page(row, start);
        const float* bias = bias_of(tile, r, start);
        for (int p = 0; p < kParts; ++p) {
            float* at = scores + b * kPageTokens + p * kLanes;
            F32v x = load_f32(at);
            if (Pool::kScaled) x = Pool::scale(x, tile.q + r * tile.q_stride, chunk.page[b], task.kv, p);
            if (task.softcap != 0.0f) x = tanh(x * set_f32(task.scale / task.softcap));
            if (bias) x = x + load_f32(bias + p * kLanes);
            x = choose(seen >> p * kLanes, x, set_f32(kUnseen));
            store_f32(at, x);
            largest.part[p] = max(largest.part[p], x);
        }
    }
    return top_lane(largest);
}

// The largest score, for a chunk whose scores `mask_scores` would not change.
HEADRACE_INLINE float see_all(const float* scores, int vectors) {
    Lanes16 largest;
    for (int p = 0; p < kParts; ++p) largest.part[p] = set_f32(kUnseen);
    for (int i = 0; i < vectors; ++i)
        largest.part[i % kParts] = max(largest.part[i % kParts], load_f32(scores + i * kLanes));
    return top_lane(largest);
}

// Replaces the scores of `rows` rows in a chunk by softmax weights and updates the weight sums. `keep` [rows]: factor
// that rescales the earlier sums to the new maximum.
template <class Pool, int rows>
HEADRACE_INLINE void softmax_update(const Tile& tile, int first, ChunkView view, float* scores, const ChunkPages& chunk,
                                    float* keep, typename Pool::Weights& weights) {
    const AttentionTask& task = tile.task;
    const bool plain = view.open && plain_scores<Pool>(task);
    const float unit = (task.softcap != 0.0f ? task.softcap : task.scale) * kLog2E;  // scores to exponents of 2
    float top[16];
    for (int first_row = 0; first_row < rows; first_row += kLanes) {
        const int count = rows - first_row < kLanes ? rows - first_row : kLanes;
        F32v largest = set_f32(kUnseen);
        for (int i = 0; i < count; ++i) {
            const int r = first_row + i;
            float* row = scores + r * kChunk;
            const float most =
                plain ? see_all(row, chunk.count * kParts) : mask_scores<Pool>(tile, first + r, view, row, chunk);
            largest = choose(1u << i, set_f32(most), largest);  // through memory, the load would wait for the stores
        }
        float* row_max = tile.state.row_max() + first + first_row;
        const F32v before = load_f32(row_max, count), now = max(largest * set_f32(unit), before);
        store_f32(row_max, now, count);
        store_f32(top + first_row, now);
        store_f32(keep + first_row, exp2(before - now));
    }
    for (int r = 0; r < rows; ++r) {
        Lanes16 sum;
        float* sums = tile.state.sums(first + r);
        for (int p = 0; p < kParts; ++p) sum.part[p] = load_f32(sums + p * kLanes) * set_f32(keep[r]);
#pragma GCC unroll 4
        for (int i = 0; i < chunk.count * kParts; ++i) {
            const F32v x = load_f32(scores + r * kChunk + i * kLanes);
            const F32v weight = exp2(multiply_add(x, set_f32(unit), set_f32(-top[r])));
            Pool::rescale(weight, i, chunk, task.kv, r, weights, sum.part[i % kParts]);
        }
        Pool::quantize_weights(chunk, r, weights);
        for (int p = 0; p < kParts; ++p) store_f32(sums + p * kLanes, sum.part[p]);
    }
}

template <class Pool, int rows, int vectors, bool fetch>
HEADRACE_INLINE void all_values(const Tile& tile, const typename Pool::Weights& weights, const float* keep,
                                const ChunkPages& chunk, int d, float* o) {
    const KVShape& kv = tile.task.kv;
    for (; d + vectors * kLanes <= kv.padded; d += vectors * kLanes) {
        values<Pool, rows, vectors, fetch>(weights, keep, chunk, kv, d, o, tile.state.stride());
    }
    if constexpr (vectors > 1) all_values<Pool, rows, vectors - 1, fetch>(tile, weights, keep, chunk, d, o);
}

// Attends `rows` rows, from row `first` on, to one chunk. `room`: scores [rows][kChunk].
template <class Pool, int rows, bool fetch>
__attribute__((noinline)) static void attend_rows(const Tile& tile, int first, ChunkView view, const ChunkPages& chunk,
                                                  float* room) {
    const float* q = tile.q + first * tile.q_stride;
    const KVShape& kv = tile.task.kv;
    typename Pool::Weights weights;
    float keep[16];
    if constexpr (Pool::kTiles) {
        Pool::use_rows(rows, tile.configured);
        Pool::template scores<fetch>(q, tile.q_stride, kv, chunk, room);
        softmax_update<Pool, rows>(tile, first, view, room, chunk, keep, weights);
        float* values = tile.state.values(first);
        return Pool::template values<fetch>(weights, keep, rows, chunk, kv, values, tile.state.stride());
    } else {
        int b = 0;
        for (; kMaxPages >= 4 && b + 4 <= chunk.count; b += 4) {
            scores<Pool, rows, kMaxPages, fetch>(q, tile.q_stride, kv, chunk, b, room + b * kPageTokens);
        }
        for (; kMaxPages >= 4 && b + 2 <= chunk.count; b += 2) {
            scores<Pool, rows, 2, fetch>(q, tile.q_stride, kv, chunk, b, room + b * kPageTokens);
        }
        for (; b < chunk.count; ++b)
            scores<Pool, rows, 1, fetch>(q, tile.q_stride, kv, chunk, b, room + b * kPageTokens);
        softmax_update<Pool, rows>(tile, first, view, room, chunk, keep, weights);
        all_values<Pool, rows, kTuning.attention_vectors, fetch>(tile, weights, keep, chunk, 0,
                                                                 tile.state.values(first));
    }
}

template <class Pool, bool fetch, int rows = Pool::kRows>
HEADRACE_INLINE void attend_some(int count, const Tile& tile, int first, ChunkView view, const ChunkPages& chunk,
                                 float* room) {
    if (count == rows) return attend_rows<Pool, rows, fetch>(tile, first, view, chunk, room);
    if constexpr (rows > 1) attend_some<Pool, fetch, rows - 1>(count, tile, first, view, chunk, room);
}

// Pages [first, last) of the feed, all in one chunk. The pages to prefetch are one chunk ahead: pages of this item,
// then of the next item.
HEADRACE_INLINE ChunkPages pages_of(const Tile& tile, int first, int last) {
    const KVShape& kv = tile.task.kv;
    const int32_t* table = tile.task.page_table + tile.feed.pages;
    ChunkPages chunk;
    chunk.count = last - first;
    // The next item's pages follow the end of this item, or of its first chunk if the item is shorter.
    const int turn = tile.end_page > tile.begin_page + kChunkPages ? tile.end_page : tile.begin_page + kChunkPages;
    for (int b = 0; b < chunk.count; ++b) {
        const int next = first + b + kChunkPages;
        chunk.page[b] = tile.task.pool + kv.page_offset(table[first + b], tile.tile.kv_head);
        chunk.next[b] = chunk.page[b];
        if (next < tile.end_page) chunk.next[b] = tile.task.pool + kv.page_offset(table[next], tile.tile.kv_head);
        if (next >= turn && next - turn < tile.upcoming.count) chunk.next[b] = tile.upcoming.page[next - turn];
    }
    return chunk;
}

// Rows of a tile see no KV index outside [begin, end); all rows see all of [open_begin, open_end).
struct Reach {
    int begin, end, open_begin, open_end;
    bool paths;  // some row has a path, so the rows see different nodes
};

HEADRACE_INLINE Reach reach_of(const Tile& tile) {
    constexpr int kMost = 0x7fffffff;
    Reach reach{kMost, 0, 0, kMost, false};
    for (int t = 0; t < tile.tile.tokens; ++t) {
        const AttentionRow& row = tile.task.rows[tile.tile.row + t];
        if (row.begin < row.end) {
            reach.begin = row.begin < reach.begin ? row.begin : reach.begin;
            reach.end = row.end > reach.end ? row.end : reach.end;
        }
        reach.open_begin = row.begin > reach.open_begin ? row.begin : reach.open_begin;
        reach.open_end = row.end < reach.open_end ? row.end : reach.open_end;
        reach.paths |= row.path != 0;
    }
    return reach;
}

// Attends rows [first, last) of a tile to one chunk, in groups of nearly equal size.
template <class Pool>
HEADRACE_INLINE void attend_chunk(const Tile& tile, int first, int last, ChunkView view, const ChunkPages& chunk,
                                  float* room) {
    const int groups = (last - first + Pool::kRows - 1) / Pool::kRows;
    for (int g = 0, row = first; g < groups; ++g) {
        const int count = (last - row) / (groups - g);
        if (g == 0) attend_some<Pool, true>(count, tile, row, view, chunk, room);
        if (g > 0) attend_some<Pool, false>(count, tile, row, view, chunk, room);
        row += count;
    }
}

// The pages of a chunk as token t sees them. Pages with draft nodes are copied to `room`, with the nodes of the token's
// path in consecutive slots.
HEADRACE_INLINE ChunkPages pages_of_path(const Tile& tile, int t, ChunkPages chunk, int first_page, uint8_t* room) {
    const KVShape& kv = tile.task.kv;
    const int32_t* table = tile.task.page_table + tile.feed.pages;
    const int node0 = tile.feed.first_node;
    for (int b = 0; b < chunk.count; ++b) {
        const int start = (first_page + b) * kPageTokens;
        if (start + kPageTokens <= node0) continue;
        uint8_t* page = room + b * kv.page_bytes;
        __builtin_memcpy(page, chunk.page[b], (size_t)kv.page_bytes);
        int index = node0;  // KV index at which the row sees the node
        for (uint64_t path = tile.task.rows[tile.tile.row + t].path; path; path &= path - 1, ++index) {
            const int stored = node0 + __builtin_ctzll(path);
            if (index < start || index >= start + kPageTokens) continue;
            const uint8_t* from = tile.task.pool + kv.page_offset(table[stored / kPageTokens], tile.tile.kv_head);
            copy_token(kv, from, stored % kPageTokens, page, index - start);
        }
        chunk.page[b] = page;
    }
    return chunk;
}

// Attends to a chunk that contains draft nodes. Consecutive tokens without a path share the stored pages.
template <class Pool>
static void attend_nodes(const Tile& tile, ChunkView view, const ChunkPages& chunk, float* room, uint8_t* pages) {
    const AttentionRow* rows = tile.task.rows + tile.tile.row;
    for (int t = 0, next; t < tile.tile.tokens; t = next) {
        next = t + 1;
        const bool path = rows[t].path != 0;
        while (!path && next < tile.tile.tokens && !rows[next].path) ++next;
        const ChunkPages seen = path ? pages_of_path(tile, t, chunk, view.start / kPageTokens, pages) : chunk;
        attend_chunk<Pool>(tile, t * tile.share, next * tile.share, view, seen, room);
    }
}

// Computes one split, starting from an empty state. `room`: scores [kScoreRows][kChunk], then pages of paths.
template <class Pool>
static void attend_split(const Tile& tile, const Reach& reach, int split, float* room) {
    const State& state = tile.state;
    __builtin_memset(state.data, 0, 4 * (size_t)state.rows * (size_t)state.stride());
    for (int r = 0; r < state.rows; ++r) state.row_max()[r] = kLowest;
    const int end = reach.end < (split + 1) * kSplit ? reach.end : (split + 1) * kSplit;
    for (int start = split * kSplit; start < end; start += kChunk) {
        const int from = reach.begin > start ? reach.begin : start, to = end < start + kChunk ? end : start + kChunk;
        if (from >= to) continue;
        const int first_page = from / kPageTokens, last_page = (to + kPageTokens - 1) / kPageTokens;
        const ChunkPages chunk = pages_of(tile, first_page, last_page);
        const ChunkView view{first_page * kPageTokens,
                             first_page * kPageTokens >= reach.open_begin && last_page * kPageTokens <= reach.open_end};
        if (reach.paths && last_page * kPageTokens > tile.feed.first_node) {
            attend_nodes<Pool>(tile, view, chunk, room, (uint8_t*)(room + kScoreRows * kChunk));
        } else {
            attend_chunk<Pool>(tile, 0, state.rows, view, chunk, room);
        }
    }
}

// into = into + part; both are rescaled to the larger maximum.
static void merge_states(const State& into, const State& part) {
    for (int r = 0; r < into.rows; ++r) {
        const float before = into.row_max()[r], other = part.row_max()[r], top = before > other ? before : other;
        const F32v a = exp2(set_f32(before - top)), b = exp2(set_f32(other - top));
        float *x = into.sums(r), *y = part.sums(r);
        for (int i = 0; i < into.stride(); i += kLanes)
            store_f32(x + i, multiply_add(load_f32(x + i), a, load_f32(y + i) * b));
        into.row_max()[r] = top;
    }
}

static void write_head(const AttentionTask& task, int row, int head, const float* x) {
    const int dim = task.kv.dim, column = head * dim, end = column + dim;
    if (task.out) __builtin_memcpy(task.out + row * task.out_stride + column, x, 4 * (size_t)dim);
    const bool last = head == task.heads - 1;
    if (task.bf16.x) {
        uint16_t* to = task.bf16.x + (int64_t)row * task.bf16.kp + column;
        round_to_bf16(x, dim, to);
        for (int d = end; last && d < task.bf16.kp; ++d) to[d - column] = 0;
    }
    if (task.a8.blocks) {
        A8Block* blocks = task.a8.blocks + (int64_t)row * task.a8.tiles;
        for (int d = 0; d < dim; d += 32) quantize_group(x + d, blocks + (column + d) / 64, (column + d) / 32 % 2);
        const float zeros[32] = {};
        if (last && end % 64) quantize_group(zeros, blocks + end / 64, 1);
    }
}

// Divides the values by the weight sums, including the sink's weight, and writes the result in the output format.
static void finish_rows(const AttentionTask& task, const AttentionTile& tile, const State& state, float* room) {
    const int share = tile.share;
    for (int r = 0; r < state.rows; ++r) {
        const int head = tile.head + r % share;
        Lanes16 lanes;
        for (int p = 0; p < kParts; ++p) lanes.part[p] = load_f32(state.sums(r) + p * kLanes);
        float sum = sum_lanes(lanes), factor = 1.0f;
        if (task.sinks) {
            const float sink = task.sinks[head] * kLog2E, before = state.row_max()[r],
                        top = sink > before ? sink : before;
            float scale[kLanes], weight[kLanes];
            store_f32(scale, exp2(set_f32(before - top)));
            store_f32(weight, exp2(set_f32(sink - top)));
            factor = scale[0];
            sum = sum * factor + weight[0];
        }
        const F32v inverse = set_f32(sum == 0.0f ? 0.0f : factor / sum);  // a row that sees nothing gives 0
        for (int d = 0; d < task.kv.padded; d += kLanes) store_f32(room + d, load_f32(state.values(r) + d) * inverse);
        write_head(task, tile.row + r / share, head, room);
    }
}

HEADRACE_INLINE State partial_state(const AttentionTask& task, const AttentionTile& tile, int split) {
    const int rows = tile.tokens * tile.share;
    const size_t place = (size_t)tile.partial + (size_t)(split - tile.first_split) * state_floats(task.kv, rows);
    return {task.partials + place, rows, task.kv.padded};
}

// Converts the queries of a tile's rows to the format of the pool's products: q [rows][q_stride].
template <class Pool>
HEADRACE_INLINE void prepare_rows(const AttentionTask& task, const AttentionTile& at, float* q, int q_stride,
                                  float* head) {
    const KVShape& kv = task.kv;
    const int share = at.share;
    for (int r = 0; r < at.tokens * share; ++r) {
        const int row = at.row + r / share, column = (at.head + r % share) * kv.dim;
        // The next token's query may be in the cache of the core that wrote it.
        if (r + share < at.tokens * share) fetch(task.q + (row + 1) * task.stride + column, kv.dim * 4);
        prepare_head(task.q + row * task.stride + column, kv, task.q_norm, task.norm_eps, task.q_rope,
                     task.positions[row], head);
        Pool::prepare(head, kv.padded, q + r * q_stride);
    }
}

// Computes splits of several tiles at once, so that each page is read once. Each tile gets its own partial results.
template <class Pool>
static void attend_together(const AttentionTask& task, const AttentionItem& item, const AttentionItem* after,
                            float* scratch) {
    const KVShape& kv = task.kv;
    const AttentionTile& first = task.tiles[item.tile];
    const int32_t* members = task.members + item.first_member;
    const int share = first.share, rows = item.tokens * share, q_stride = kv.padded + 16;
    float* q = scratch;
    const State state{q + rows * q_stride, rows, kv.padded};
    float* head = state.data + state_floats(kv, rows);
    float* room = head + kv.padded;
    for (int m = 0, row = 0; m < item.members; ++m) {
        const AttentionTile& tile = task.tiles[members[m]];
        prepare_rows<Pool>(task, tile, q + row * q_stride, q_stride, head);
        row += tile.tokens * share;
    }
    const int begin = item.first_split * kSplit, end = item.last_split * kSplit;
    const Tile tile{task,
                    task.feeds[first.feed],
                    first,
                    share,
                    q,
                    q_stride,
                    ahead_of(task, after),
                    begin / kPageTokens,
                    end / kPageTokens,
                    state};
    for (int split = item.first_split; split < item.last_split; ++split) {
        attend_split<Pool>(tile, {begin, end, begin, end, false}, split, room);
        for (int m = 0, row = 0; m < item.members; ++m) {
            const State part = partial_state(task, task.tiles[members[m]], split);
            __builtin_memcpy(part.data, state.sums(row), 4 * (size_t)part.rows * (size_t)part.stride());
            __builtin_memcpy(part.row_max(), state.row_max() + row, 4 * (size_t)part.rows);
            row += part.rows;
        }
    }
}

template <class Pool>
static void attend_item(const AttentionTask& task, const AttentionItem& item, const AttentionItem* after,
                        float* scratch) {
    if (item.members) return attend_together<Pool>(task, item, after, scratch);
    const KVShape& kv = task.kv;
    const AttentionTile& at = task.tiles[item.tile];
    const AttentionFeed& feed = task.feeds[at.feed];
    if (item.append) append(task, at.feed, at.kv_head, 0, feed.rows, scratch);
    const int share = at.share, rows = at.tokens * share, q_stride = kv.padded + 16;
    float* q = scratch;
    const State state{q + rows * q_stride, rows, kv.padded};
    const State other{state.data + state_floats(kv, rows), rows, kv.padded};
    float* head = other.data + state_floats(kv, rows);
    float* room = head + kv.padded;
    prepare_rows<Pool>(task, at, q, q_stride, head);
    Tile tile{task, feed, at, share, q, q_stride, ahead_of(task, after), 0, 0, state};
    const Reach reach = reach_of(tile);
    const int begin = item.first_split * kSplit, end = item.last_split * kSplit;
    tile.begin_page = (reach.begin > begin ? reach.begin : begin) / kPageTokens;
    tile.end_page = ((reach.end < end ? reach.end : end) + kPageTokens - 1) / kPageTokens;
    for (int split = item.first_split; split < item.last_split; ++split) {
        tile.state = at.items > 1 ? partial_state(task, at, split) : split == item.first_split ? state : other;
        attend_split<Pool>(tile, reach, split, room);
        if (at.items == 1 && split > item.first_split) merge_states(state, other);
    }
    if (at.items > 1) return;
    if (item.first_split == item.last_split)
        attend_split<Pool>(tile, {0, 0, 0, 0, false}, 0, room);  // no row sees anything
    finish_rows(task, at, state, head);
}

static void merge(const AttentionTask& task, const AttentionTile& tile, float* scratch) {
    const State first = partial_state(task, tile, tile.first_split);
    for (int split = tile.first_split + 1; split < tile.last_split; ++split) {
        merge_states(first, partial_state(task, tile, split));
    }
    finish_rows(task, tile, first, scratch);
}

}  // namespace headrace::HEADRACE_ISA
