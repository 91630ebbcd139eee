// Attention over the paged pool: K and V into their pages, then softmax(q K) V for tiles of rows.
//
// Row-invariant: what a row gets depends on the row alone. KV is walked in chunks of kChunk tokens, at multiples of
// kChunk, with a running maximum (FlashAttention, Dao et al. 2022); a sum is begun anew at every multiple of kSplit,
// and the splits are merged in their order whoever computed them. A token that a row does not see adds exact zeros.
#pragma once

#include "attention/kv_page.h"
#include "linear/quantize_act_kernels.h"

namespace headrace {

constexpr int kChunk = 128;
constexpr int kSplit = 256;
constexpr int kTileRows = 48;  // rows of a tile: tokens times query heads of a KV head, unless one token has more

struct RopeTable {
    const float* cos;  // [positions][dim / 2], or null: no rotation
    const float* sin;
    int32_t dim;       // the first so many values of a head are turned
    bool interleaved;  // pairs (2i, 2i + 1) instead of (i, i + dim / 2)
};

// A row of the step sees KV indices [begin, end) of its own line of tokens: the known ones, then its ancestors among
// the nodes of its feed and itself, or all of these, one after the other. `path` names those nodes where they are not
// 0, 1, 2 ...: they are stored elsewhere than they are seen, and the row still gets the bits it would get without the
// tree.
struct AttentionRow {
    int32_t begin, end;
    uint64_t path;
};

struct AttentionFeed {
    int32_t row, rows;   // of the step
    int32_t kv_start;    // KV index of its first row
    int32_t first_node;  // KV index of node 0; the feed's end where it has none
    int32_t pages;       // where its pages begin in the page table
};

// Rows that share K and V: `tokens` of a feed, by all query heads of one KV head.
struct AttentionTile {
    int32_t feed, kv_head;
    int32_t row, tokens;
    int32_t first_split, last_split;  // [first, last): of the splits that any of them sees
    int64_t partial;                  // place of the first split's partial result, where the tile is cut
    int32_t items;
    int32_t own_split;  // the splits before it are read together with other tiles
};

// Some splits of a tile; or of several that read the same pages there, all of them seen by all their rows. Those are
// the task's `members` from `first_member` on, the first of them is `tile`, and their tokens are few enough for one
// tile.
struct AttentionItem {
    int32_t tile;
    int32_t first_split, last_split;
    bool append;  // store the feed's K and V of this head first
    int32_t tokens;
    int32_t first_member, members;  // 0 members: the tile alone
};

// What is added to scores by how far a key is from the row: a line of floats for each head, by distance (key - row)
// from
// -(most + 16) on. From `most` on, both ways, all distances are alike, so a page that is farther is read at an end.
struct DistanceBias {
    const float* lines;  // [heads][bias_width(most)], or null
    int32_t most;
};

static inline int bias_width(int most) { return 2 * (most + kPageTokens); }

// One layer of one step.
struct AttentionTask {
    KVShape kv;
    uint8_t* pool;  // the layer's pages
    int32_t heads;
    const float* q;  // [rows][heads * dim], k and v [rows][kv heads * dim]; `stride` floats between rows of each
    const float* k;
    const float* v;
    int64_t stride;
    const float* q_norm;  // [dim] or null: RMS norm of a head
    const float* k_norm;
    float norm_eps;
    RopeTable rope;
    const float* k_shift;  // [kv heads * dim], taken off K when it is turned, or null
    float scale;
    float softcap;       // 0: none
    const float* sinks;  // [heads] or null
    DistanceBias bias;   // of scores before they are scaled; then no item has members
    // the step
    const AttentionFeed* feeds;
    const AttentionTile* tiles;
    const int32_t* members;
    const AttentionRow* rows;
    const int32_t* positions;  // [rows], rotary
    const int32_t* page_table;
    float* partials;
    // The result [rows][heads * dim]: as float32, or as A8 (dim a multiple of 32) or bfloat16 for the next layer.
    float* out;
    int64_t out_stride;
    A8 a8;
    Bf16Rows bf16;
};

struct AttentionKernels {
    // Stores K and V of rows [first, last) of the feed's, one head. Rows of one page belong to one call.
    void (*append)(const AttentionTask& task, int feed, int kv_head, int first, int last, float* scratch);
    // An item's splits: its tile's result, or partial results where tiles are cut. `after`: the item that this thread
    // is likely to take next, or null; its memory is fetched meanwhile.
    void (*attend)(const AttentionTask& task, const AttentionItem& item, const AttentionItem* after, float* scratch);
    // The result of a tile that was cut, once all its items are done.
    void (*merge)(const AttentionTask& task, const AttentionTile& tile, float* scratch);
    // One token of one head, from page to page.
    void (*copy)(const KVShape& kv, const uint8_t* from, int from_slot, uint8_t* to, int to_slot);
    // Tests and tools: one token's K or V [dim] in and out of a page.
    void (*write)(const KVShape& kv, uint8_t* page, int slot, const float* k, const float* v, float* scratch);
    void (*read)(const KVShape& kv, const uint8_t* page, int slot, float* k, float* v);
};

// Floats of the running result of some rows: per row 16 lanes of weight sums and `padded` values, then all maxima.
static inline size_t state_floats(const KVShape& kv, int rows) {
    return (size_t)rows * (size_t)(kv.padded + 16) + (size_t)(rows + 15) / 16 * 16;
}

static inline int tile_rows(int heads, int kv_heads) {
    const int share = heads / kv_heads;
    return share >= kTileRows ? share : kTileRows / share * share;
}

// Floats of scratch, 64-byte aligned, of one thread: queries, two results, scores, a token on its way, pages of paths.
static inline size_t attention_scratch_floats(const KVShape& kv, int heads) {
    const int rows = tile_rows(heads, kv.heads), pages = kChunk / kPageTokens * kv.page_bytes / 4;
    return (size_t)rows * (size_t)(kv.padded + 16) + 2 * state_floats(kv, rows) + 8 * kChunk + 4 * (size_t)kv.padded +
           (size_t)pages;
}

}  // namespace headrace
