// Tiles of rows over their splits, chunk by chunk; attention_kernels.h says what the results may depend on.
constexpr float kLowest =
    -1e30f;  // the maximum of a row that has seen nothing: finite, so that differences are numbers
constexpr float kUnseen = -__builtin_inff();
constexpr float kLog2E = 1.44269504f;

// The running result of a tile's rows: weight sums in 16 lanes, the maximum (times log2 e), and weighted values.
struct State {
    float* data;
    int stride;

    float* sums(int r) const { return data + (int64_t)r * stride; }
    float& top(int r) const { return sums(r)[16]; }
    float* values(int r) const { return sums(r) + 32; }
};

// What one item works on.
struct Tile {
    const AttentionTask& task;
    const AttentionFeed& feed;
    const AttentionTile& tile;
    int share;       // query heads of a KV head
    int rows;        // tokens * share; row r is query head r % share of token r / share
    const float* q;  // [rows][q_stride], as the pool prepared them
    int q_stride;
    State state;  // of the split at hand

    const AttentionRow& row(int r) const { return task.rows[tile.row + r / share]; }
    int head(int r) const { return tile.kv_head * share + r % share; }
};

HEADRACE_INLINE uint64_t bits_below(int n) { return n <= 0 ? 0 : n >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << n) - 1; }

// Which of the 64 tokens from `start` on a row sees.
HEADRACE_INLINE uint64_t seen_in_chunk(const AttentionRow& row, int first_node, int start) {
    const uint64_t range = bits_below(row.end - start) & ~bits_below(row.begin - start);
    const int node = first_node - start;
    if (node >= 64 || node <= -64) return range;
    return range | (node >= 0 ? row.nodes << node : row.nodes >> -node);
}

// The scores of one row in a chunk -> weights and how much of the earlier sums to keep.
template <class Pool>
HEADRACE_INLINE float soften(const Tile& tile, int r, int slot, const float* scores, const ChunkPages& chunk,
                             uint64_t seen, typename Pool::Weights& weights) {
    const AttentionTask& task = tile.task;
    const int vectors = chunk.count * kParts;
    const float* q = tile.q + r * tile.q_stride;
    F32v x[kChunk / kLanes];
    Lanes16 largest;
    for (int p = 0; p < kParts; ++p) largest.part[p] = set_f32(tile.state.top(r));
    const bool all = (seen & bits_below(chunk.count * kPageTokens)) == bits_below(chunk.count * kPageTokens);
    for (int i = 0; i < vectors; ++i) {
        const int p = i % kParts;
        x[i] = Pool::scale(load_f32(scores + i * kLanes), q, chunk.page[i / kParts], task.kv, p);
        if (task.softcap != 0.0f) {
            x[i] = tanh(x[i] * set_f32(task.scale / task.softcap)) * set_f32(task.softcap * kLog2E);
        } else {
            x[i] = x[i] * set_f32(task.scale * kLog2E);
        }
        if (!all) x[i] = choose((uint32_t)(seen >> i * kLanes), x[i], set_f32(kUnseen));
        largest.part[p] = max(largest.part[p], x[i]);
    }
    const float top = max_lanes(largest);
    float keep[kLanes];
    store_f32(keep, exp2(set_f32(tile.state.top(r)) - set_f32(top)));
    for (int i = 0; i < vectors; ++i) x[i] = exp2(x[i] - set_f32(top));
    Lanes16 sum;
    for (int p = 0; p < kParts; ++p) sum.part[p] = load_f32(tile.state.sums(r) + p * kLanes) * set_f32(keep[0]);
    Pool::weigh(x, chunk, task.kv, slot, weights, sum);
    for (int p = 0; p < kParts; ++p) store_f32(tile.state.sums(r) + p * kLanes, sum.part[p]);
    tile.state.top(r) = top;
    return keep[0];
}

template <class Pool, int rows, int vectors, bool fetch>
HEADRACE_INLINE void all_values(const Tile& tile, const typename Pool::Weights& weights, const float* keep,
                                const ChunkPages& chunk, int d, float* o) {
    const KVShape& kv = tile.task.kv;
    for (; d + vectors * kLanes <= kv.padded; d += vectors * kLanes) {
        values<Pool, rows, vectors, fetch>(weights, keep, chunk, kv, d, o, tile.state.stride);
    }
    if constexpr (vectors > 1) all_values<Pool, rows, vectors - 1, fetch>(tile, weights, keep, chunk, d, o);
}

// `rows` rows from `first` on with one chunk.
template <class Pool, int rows, bool fetch>
__attribute__((noinline)) static void attend_rows(const Tile& tile, int first, int start, const ChunkPages& chunk,
                                                  float* room) {
    const float* q = tile.q + first * tile.q_stride;
    const int dp = tile.task.kv.padded;
    if (chunk.count == kMaxPages && kMaxPages > 1) {
        scores<Pool, rows, kMaxPages, fetch>(q, tile.q_stride, dp, chunk, 0, room);
    } else {
        for (int b = 0; b < chunk.count; ++b) {
            scores<Pool, rows, 1, fetch>(q, tile.q_stride, dp, chunk, b, room + b * kPageTokens);
        }
    }
    typename Pool::Weights weights;
    float keep[rows];
    for (int r = 0; r < rows; ++r) {
        const uint64_t seen = seen_in_chunk(tile.row(first + r), tile.feed.first_node, start);
        keep[r] = soften<Pool>(tile, first + r, r, room + r * kChunk, chunk, seen, weights);
    }
    all_values<Pool, rows, kMaxVectors, fetch>(tile, weights, keep, chunk, 0, tile.state.values(first));
}

template <class Pool, bool fetch, int rows = Pool::kRows>
HEADRACE_INLINE void attend_some(int count, const Tile& tile, int first, int start, const ChunkPages& chunk,
                                 float* room) {
    if (count == rows) return attend_rows<Pool, rows, fetch>(tile, first, start, chunk, room);
    if constexpr (rows > 1) attend_some<Pool, fetch, rows - 1>(count, tile, first, start, chunk, room);
}

// Pages [first, last) of the feed's, all in one chunk. What is fetched meanwhile: as many of those after, up to `end`.
HEADRACE_INLINE ChunkPages pages_of(const Tile& tile, int first, int last, int end) {
    const KVShape& kv = tile.task.kv;
    const int32_t* table = tile.task.page_table + tile.feed.pages;
    ChunkPages chunk;
    chunk.count = last - first;
    for (int b = 0; b < chunk.count; ++b) {
        const int next = last + b < end ? last + b : first + b;
        chunk.page[b] = tile.task.pool + kv.page_offset(table[first + b], tile.tile.kv_head);
        chunk.next[b] = tile.task.pool + kv.page_offset(table[next], tile.tile.kv_head);
    }
    return chunk;
}

// The first and last (exclusive) KV index that any row of a tile sees.
struct Reach {
    int begin, end;
};

HEADRACE_INLINE Reach reach_of(const Tile& tile) {
    Reach reach{0x7fffffff, 0};
    for (int t = 0; t < tile.tile.tokens; ++t) {
        const AttentionRow& row = tile.task.rows[tile.tile.row + t];
        const int nodes = row.nodes ? tile.feed.first_node + 64 - __builtin_clzll(row.nodes) : 0;
        const int first =
            row.begin < row.end ? row.begin : tile.feed.first_node + (row.nodes ? __builtin_ctzll(row.nodes) : 0);
        if (row.begin >= row.end && !row.nodes) continue;  // sees nothing
        reach.begin = first < reach.begin ? first : reach.begin;
        reach.end = row.end > reach.end ? row.end : reach.end;
        reach.end = nodes > reach.end ? nodes : reach.end;
    }
    return reach;
}

// One split from nothing.
template <class Pool>
static void attend_split(const Tile& tile, Reach reach, int split, float* room) {
    for (int r = 0; r < tile.rows; ++r) {
        __builtin_memset(tile.state.sums(r), 0, 4 * (size_t)tile.state.stride);
        tile.state.top(r) = kLowest;
    }
    const int groups = (tile.rows + Pool::kRows - 1) / Pool::kRows;
    const int end = reach.end < (split + 1) * kSplit ? reach.end : (split + 1) * kSplit;
    for (int start = split * kSplit; start < end; start += kChunk) {
        const int from = reach.begin > start ? reach.begin : start, to = end < start + kChunk ? end : start + kChunk;
        if (from >= to) continue;
        const int first_page = from / kPageTokens, last_page = (to + kPageTokens - 1) / kPageTokens;
        const int base = first_page * kPageTokens;  // bit 0 of what a row sees
        const ChunkPages chunk = pages_of(tile, first_page, last_page, (reach.end + kPageTokens - 1) / kPageTokens);
        for (int g = 0, row = 0; g < groups; ++g) {
            const int count = (tile.rows - row) / (groups - g);  // groups of even size
            if (g == 0) attend_some<Pool, true>(count, tile, row, base, chunk, room);
            if (g > 0) attend_some<Pool, false>(count, tile, row, base, chunk, room);
            row += count;
        }
    }
}

// into = into + part, as sums relative to the larger maximum.
static void merge_rows(const State& into, const State& part, int rows, int padded) {
    for (int r = 0; r < rows; ++r) {
        const float top = into.top(r) > part.top(r) ? into.top(r) : part.top(r);
        const F32v a = exp2(set_f32(into.top(r)) - set_f32(top)), b = exp2(set_f32(part.top(r)) - set_f32(top));
        float *x = into.sums(r), *y = part.sums(r);
        for (int i = 0; i < 16; i += kLanes) store_f32(x + i, fma(load_f32(x + i), a, load_f32(y + i) * b));
        for (int i = 32; i < 32 + padded; i += kLanes) store_f32(x + i, fma(load_f32(x + i), a, load_f32(y + i) * b));
        into.top(r) = top;
    }
}

static void write_head(const AttentionTask& task, int row, int head, const float* x) {
    const int dim = task.kv.dim, column = head * dim, end = column + dim;
    if (task.out) __builtin_memcpy(task.out + row * task.out_stride + column, x, 4 * (size_t)dim);
    const bool last = head == task.heads - 1;
    if (task.bf16.x) {
        uint16_t* to = task.bf16.x + (int64_t)row * task.bf16.kp + column;
        for (int d = 0; d < dim; ++d) to[d] = to_bf16(x[d]);
        for (int d = end; last && d < task.bf16.kp; ++d) to[d - column] = 0;
    }
    if (task.a8.blocks) {
        A8Block* blocks = task.a8.blocks + (int64_t)row * task.a8.tiles;
        for (int d = 0; d < dim; d += 32) quantize_group(x + d, blocks + (column + d) / 64, (column + d) / 32 % 2);
        const float zeros[32] = {};
        if (last && end % 64) quantize_group(zeros, blocks + end / 64, 1);
    }
}

// Divides by the weight sums, into which a sink goes too, and leaves the result where the next layer wants it.
static void finish_rows(const AttentionTask& task, const AttentionTile& tile, const State& state, float* room) {
    const int share = task.heads / task.kv.heads;
    for (int r = 0; r < tile.tokens * share; ++r) {
        const int head = tile.kv_head * share + r % share;
        Lanes16 lanes;
        for (int p = 0; p < kParts; ++p) lanes.part[p] = load_f32(state.sums(r) + p * kLanes);
        float sum = sum_lanes(lanes), factor = 1.0f;
        if (task.sinks) {
            const float sink = task.sinks[head] * kLog2E, top = sink > state.top(r) ? sink : state.top(r);
            float scale[kLanes], weight[kLanes];
            store_f32(scale, exp2(set_f32(state.top(r)) - set_f32(top)));
            store_f32(weight, exp2(set_f32(sink) - set_f32(top)));
            factor = scale[0];
            sum = sum * factor + weight[0];
        }
        const F32v inverse = set_f32(sum == 0.0f ? 0.0f : factor / sum);  // a row that sees nothing gives 0
        for (int d = 0; d < task.kv.padded; d += kLanes) store_f32(room + d, load_f32(state.values(r) + d) * inverse);
        write_head(task, tile.row + r / share, head, room);
    }
}

template <class Pool>
static void attend_item(const AttentionTask& task, const AttentionItem& item, float* scratch) {
    const KVShape& kv = task.kv;
    const AttentionTile& at = task.tiles[item.tile];
    const AttentionFeed& feed = task.feeds[at.feed];
    if (item.append) append(task, at.feed, at.kv_head, 0, feed.rows, scratch);
    const int share = task.heads / kv.heads, rows = at.tokens * share, stride = partial_floats(kv);
    const int q_stride = kv.padded + 16, most = tile_rows(task.heads, kv.heads);
    float* q = scratch;
    State state{q + most * q_stride, stride}, other{state.data + most * stride, stride};
    float* room = other.data + most * stride;
    float* head = room + 16 * kChunk;
    for (int r = 0; r < rows; ++r) {
        const int row = at.row + r / share, column = (at.kv_head * share + r % share) * kv.dim;
        prepare_head(task.q + row * task.stride + column, kv, task.q_norm, task.norm_eps, task.rope,
                     task.positions[row], head);
        Pool::prepare(head, kv.padded, q + r * q_stride);
    }
    Tile tile{task, feed, at, share, rows, q, q_stride, state};
    const Reach reach = reach_of(tile);
    if (at.items == 1) {
        for (int split = item.first_split; split < item.last_split; ++split) {
            tile.state = split == item.first_split ? state : other;
            attend_split<Pool>(tile, reach, split, room);
            if (split > item.first_split) merge_rows(state, other, rows, kv.padded);
        }
        if (item.first_split == item.last_split) attend_split<Pool>(tile, {0, 0}, 0, room);
        finish_rows(task, at, state, head);
        return;
    }
    for (int split = item.first_split; split < item.last_split; ++split) {
        tile.state.data = task.partials + (int64_t)at.partial + (int64_t)(split - at.first_split) * rows * stride;
        attend_split<Pool>(tile, reach, split, room);
    }
}

static void attend(const AttentionTask& task, const AttentionItem& item, float* scratch) {
    switch (task.kv.type) {
        case KVType::kBf16:
            return attend_item<Bf16Pool>(task, item, scratch);
        case KVType::kInt8:
            return attend_item<Int8Pool>(task, item, scratch);
        case KVType::kF32:
            return attend_item<F32Pool>(task, item, scratch);
    }
}

static void merge(const AttentionTask& task, const AttentionTile& tile, float* scratch) {
    const int rows = tile.tokens * (task.heads / task.kv.heads), stride = partial_floats(task.kv);
    const State first{task.partials + (int64_t)tile.partial, stride};
    for (int split = 1; split < tile.last_split - tile.first_split; ++split) {
        merge_rows(first, {first.data + (int64_t)split * rows * stride, stride}, rows, task.kv.padded);
    }
    finish_rows(task, tile, first, scratch);
}
