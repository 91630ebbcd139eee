// Kernels for attention over the paged pool: storing K and V, and softmax(q K) V for tiles of rows.
//
// Row-invariant: the result of a row depends on that row alone. The kernels process KV in chunks of kChunk tokens, at
// multiples of kChunk, with a running maximum (FlashAttention, Dao et al. 2022). A new sum starts at every multiple of
// kSplit, and the splits are merged in order, whichever thread computed them. A token that a row does not see adds
// exact zeros.
#pragma once

#include "attention/kv_page.h"
#include "linear/quantize_act_kernels.h"

namespace headrace {

constexpr int kChunk = 128;
constexpr int kScoreRows = 16;  // most rows that attend to a chunk at once
constexpr int kSplit = 256;
constexpr int kTileRows = 48;  // most rows of a tile (tokens * query heads per KV head), unless one token has more

struct RopeTable {
    const float* cos;  // [positions][dim / 2], or null: no rotation
    const float* sin;
    int32_t dim;       // the first `dim` values of a head are rotated
    bool interleaved;  // pairs (2i, 2i + 1) instead of (i, i + dim / 2)
};

// A row of the step sees KV indices [begin, end) of its own sequence: the known tokens, followed by the draft nodes
// that it sees (its ancestors and itself, or all nodes). `path` has the bits of these nodes if they are not 0, 1, 2
// ...: then the nodes are stored at other indices than those at which the row sees them. The result has the bits that
// the row would get without the tree.
struct AttentionRow {
    int32_t begin, end;
    uint64_t path;
};

struct AttentionFeed {
    int32_t row, rows;   // its first row in the step, number of rows
    int32_t kv_start;    // KV index of its first row
    int32_t first_node;  // KV index of node 0; without nodes: the end of the feed
    int32_t pages;       // index of its first page in the page table
};

// Rows that share K and V: `tokens` tokens of a feed times the query heads [head, head + share) of one KV head.
struct AttentionTile {
    int32_t feed, kv_head;
    int32_t head, share;
    int32_t row, tokens;
    int32_t first_split, last_split;  // [first, last): splits that any of the rows sees
    int64_t partial;                  // cut tiles: index of the first split's result in AttentionTask::partials
    int32_t items;                    // number of items that the tile is cut into
    int32_t own_split;                // splits before this one are read together with other tiles
};

// Some splits of one tile, or of several tiles that read the same pages there, if all rows of these tiles see all of
// the pages. The several tiles are AttentionTask::members from `first_member` on; the first of them is `tile`. Together
// they have no more tokens than fit one tile.
struct AttentionItem {
    int32_t tile;
    int32_t first_split, last_split;
    bool append;  // stores the feed's K and V of this head first
    int32_t tokens;
    int32_t first_member, members;  // 0 members: `tile` alone
};

// Bias added to scores, by the distance key - row: for each head, one line of floats for the distances from
// -(most + 16). All distances of at least `most` in one direction have the same bias, so pages beyond the ends of the
// line use its ends.
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
    const float* q;  // [rows][heads * dim]; k and v: [rows][kv heads * dim]; rows are `stride` floats apart
    const float* k;
    const float* v;
    int64_t stride;
    const float* q_norm;  // [dim] or null: RMS norm of a head
    const float* k_norm;
    float norm_eps;
    RopeTable rope;        // of k
    RopeTable q_rope;      // of q: `rope`, or its values times a factor of the position
    const float* k_shift;  // [kv heads * dim], subtracted from K after the rotation, or null
    float scale;
    float softcap;       // 0: none
    const float* sinks;  // [heads] or null
    DistanceBias bias;   // added to scores before they are scaled; with a bias, no item has members
    // Set by AttentionStep::prepare:
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
    // Stores K and V of one head for rows [first, last) of the feed. All rows of one page must be in one call.
    void (*append)(const AttentionTask& task, int feed, int kv_head, int first, int last, float* scratch);
    // Computes an item: the result of its tile, or partial results if its tiles are cut. `after`: the item that this
    // thread will probably take next, or null; its memory is prefetched.
    void (*attend)(const AttentionTask& task, const AttentionItem& item, const AttentionItem* after, float* scratch);
    // Computes the result of a cut tile from the partial results, after all its items are done.
    void (*merge)(const AttentionTask& task, const AttentionTile& tile, float* scratch);
    // Copies one token of one head from page to page.
    void (*copy)(const KVShape& kv, const uint8_t* from, int from_slot, uint8_t* to, int to_slot);
    // For tests and tools: writes or reads one token's K and V [dim] of one head.
    void (*write)(const KVShape& kv, uint8_t* page, int slot, const float* k, const float* v, float* scratch);
    void (*read)(const KVShape& kv, const uint8_t* page, int slot, float* k, float* v);
};

// Floats of the running result of `rows` rows: per row 16 lanes of weight sums and `padded` values, then all maxima.
static inline size_t state_floats(const KVShape& kv, int rows) {
    return (size_t)rows * (size_t)(kv.padded + 16) + (size_t)(rows + 15) / 16 * 16;
}

// Rows of the largest tile, if up to `share` query heads read one KV head.
static inline int tile_rows(int share) { return share >= kTileRows ? share : kTileRows / share * share; }

// Floats of scratch per thread, 64-byte aligned: queries, two running results, scores, one token, pages of paths.
static inline size_t attention_scratch_floats(const KVShape& kv, int share) {
    const int rows = tile_rows(share), pages = kChunk / kPageTokens * kv.page_bytes / 4;
    return (size_t)rows * (size_t)(kv.padded + 16) + 2 * state_floats(kv, rows) + kScoreRows * kChunk +
           4 * (size_t)kv.padded + (size_t)pages;
}

}  // namespace headrace
