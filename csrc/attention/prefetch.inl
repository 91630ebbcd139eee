// Prefetching for the next item. A tile of few rows computes faster than memory delivers its K and V, so they are
// prefetched while the item before it runs.
#pragma once

#include "attention/kv_page.inl"

namespace headrace::HEADRACE_ISA {

constexpr int kChunkPages = kChunk / kPageTokens;

// The first pages of the next item, at most one chunk.
struct Upcoming {
    const uint8_t* page[kChunkPages];
    int count;
};

// Prefetches the memory that storing the feed's first token writes (a part of every line of K, one line of V), and its
// input.
HEADRACE_INLINE void fetch_append(const AttentionTask& task, const AttentionFeed& feed, int kv_head) {
    const KVShape& kv = task.kv;
    const int slot = feed.kv_start % kPageTokens, deep = kv.deep();
    const uint8_t* page =
        task.pool + kv.page_offset(task.page_table[feed.pages + feed.kv_start / kPageTokens], kv_head);
    fetch(page, kv.half_bytes);
    fetch(page + kv.half_bytes + slot / deep * kv.padded * 4, kv.padded * 4);
    fetch(task.k + feed.row * task.stride + kv_head * kv.dim, kv.dim * 4);
    fetch(task.v + feed.row * task.stride + kv_head * kv.dim, kv.dim * 4);
}

HEADRACE_INLINE Upcoming ahead_of(const AttentionTask& task, const AttentionItem* item) {
    Upcoming upcoming{{}, 0};
    if (!item) return upcoming;
    const AttentionTile& tile = task.tiles[item->tile];
    const AttentionFeed& feed = task.feeds[tile.feed];
    fetch(task.q + tile.row * task.stride + tile.head * task.kv.dim, tile.share * task.kv.dim * 4);
    if (item->append) fetch_append(task, feed, tile.kv_head);
    const int begin = task.rows[tile.row].begin, end = task.rows[tile.row + tile.tokens - 1].end;
    const int from = item->first_split * kSplit, to = item->last_split * kSplit;
    const int last = ((end < to ? end : to) + kPageTokens - 1) / kPageTokens;
    for (int page = (begin > from ? begin : from) / kPageTokens; page < last && upcoming.count < kChunkPages; ++page) {
        upcoming.page[upcoming.count++] =
            task.pool + task.kv.page_offset(task.page_table[feed.pages + page], tile.kv_head);
    }
    return upcoming;
}

}  // namespace headrace::HEADRACE_ISA
