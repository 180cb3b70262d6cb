// The order in which CTAs take the work of the backward. A ticket is a number that a CTA draws from a counter; it
// stands for one part (bwd_parts.h) of one key tile of one KV head. Host code without CUDA can include this file.
//
// The order decides between two losses. A CTA that works on a key tile follows the CTA of the next older tile, row by
// row. If it follows closely, each delay of one CTA delays all CTAs behind it. If it follows at a distance, Q, dO and
// dq of its rows may have left the L2 cache. So the tiles of a head are spread over time: between two of them come
// tiles of other heads, a few with long key ranges and many with short ones (choose_head_order).
//
//     slot               0    1    2    3    4    5    6    7        4 key tiles, distance 2, one head together
//     lane 0 (newest)   0.0  0.1  1.0  1.1  2.0  2.1                 h.t is tile t of head h; tile 0 is the oldest
//     lane 1                      0.2  0.3  1.2  1.3  2.2  2.3       tickets run down the columns, from left to right
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/params.h"
#include "kernels/hopper/bwd_parts.h"
#include "kernels/hopper/bwd_tiles.h"
#include "kernels/hopper/hopper.h"

namespace megatron_sb::hopper {

constexpr int kMostDocumentGroups = 64;  // of HeadOrder

struct HeadOrder {
    static constexpr int32_t kOneAfterAnother = INT32_MAX;

    int32_t heads_together;  // KV heads that start together
    int32_t distance;        // key tiles between the starts of two such groups; if there are fewer, all of them
    int32_t steps_together;  // of a head: documents with so many form a group; its tiles come before those of the next
};

// What a ticket stands for.
struct Work {
    int32_t key_tile;  // its index in the list of key tiles
    int32_t head;      // KV head, counted over the batch
    int32_t part;
};

class TicketOrder {
  public:
    // num_heads: KV heads, counted over the batch.
    SB_HOST_DEVICE TicketOrder(const HeadOrder& order, int num_heads, int num_key_tiles, int num_parts)
        : num_heads_(num_heads),
          num_key_tiles_(num_key_tiles),
          num_parts_(num_parts),
          heads_together_(order.heads_together),
          distance_(order.distance < num_key_tiles ? order.distance : num_key_tiles),
          num_lanes_(distance_ > 0 ? (num_key_tiles + distance_ - 1) / distance_ : 1) {}

    // Whether this ticket, or a later one, has work.
    SB_HOST_DEVICE bool is_before_end(int ticket) const {
        const int groups = (num_heads_ + heads_together_ - 1) / heads_together_;
        return num_key_tiles_ > 0 && slot_of(ticket) < distance_ * (groups - 1) + num_key_tiles_;
    }
    // Finds the work of a ticket that is before the end. Returns false if it has none: lanes are empty at the beginning
    // and at the end.
    SB_HOST_DEVICE bool find(int ticket, Work* work) const {
        const int slot = slot_of(ticket), among_heads = ticket / num_parts_;
        const int group = slot / distance_ - among_heads / heads_together_ % num_lanes_;
        *work = {slot - group * distance_, group * heads_together_ + among_heads % heads_together_,
                 ticket % num_parts_};
        return group >= 0 && work->head < num_heads_ && work->key_tile < num_key_tiles_;
    }

  private:
    SB_HOST_DEVICE int slot_of(int ticket) const { return ticket / num_parts_ / heads_together_ / num_lanes_; }

    const int num_heads_, num_key_tiles_, num_parts_, heads_together_, distance_, num_lanes_;
};

// Groups of at most `most_together` heads, of equal size if possible, one after another.
inline HeadOrder one_after_another(int heads, int most_together, int steps_together) {
    const int together = std::max(most_together, 1), groups = (heads + together - 1) / together;
    return {(heads + groups - 1) / groups, HeadOrder::kOneAfterAnother, std::max(steps_together, 1)};
}

// Chooses the order. The constants are measured (docs/design/kernels-hopper-order.md).
inline HeadOrder choose_head_order(const Sizes& z, const Segments& segments, bool attend_current) {
    const int heads = z.batch * z.num_kv_heads, tile = backward_key_tile(z), key_tiles = (z.k_rows + tile - 1) / tile;
    // Many heads of one sequence are spread. `in_flight` of them have tiles at work. So neighbouring tiles of a head
    // are about in_flight * steps / 132 steps apart, where `steps` is what a key tile has on average, about as many as
    // the middle one. The data of that many steps of all CTAs stay in the L2 cache.
    if (segments.by_value() && z.num_heads == z.num_kv_heads) {  // the host cannot read a segment table
        const Segment s = clamped(segments.whole, z);
        const int steps = num_steps(s) - oldest_step(s, attend_current, key_tiles / 2 * tile);
        constexpr float kCached = 65536.f, kFewest = 1.75f, kMost = 16.f;
        const float in_flight = std::min(kCached / float(stored_columns(z) * std::max(steps, 1)), kMost);
        if (in_flight >= kFewest && heads >= 2 * in_flight) return {1, int((key_tiles - 1) / in_flight) + 1, INT32_MAX};
    }
    // Groups of heads, one after another. The chains of a group fill the GPU, and follow each other as closely as they
    // can.
    const int chains = z.k_rows <= 4096 ? 32 : z.k_rows <= 16384 ? 24 : z.k_rows <= 32768 ? 4 : 6;
    if (segments.by_value() && z.k_rows <= 65536) return one_after_another(heads, chains, INT32_MAX);
    // With a segment table, and for very long sequences: groups of documents in a group of heads, so that Q, dO and dq
    // of a group stay in the L2 cache. They have 8 bytes for each element.
    constexpr int64_t kCachedBytes = 48 << 20;
    constexpr int kMostRows = 16384, kLeastHeads = 3;
    const int cached_rows = int(kCachedBytes / (8 * stored_columns(z) * (z.num_heads / z.num_kv_heads)));
    const int rows = std::max(std::min({z.q_rows, kMostRows, cached_rows / kLeastHeads}), kStepRows);
    const int rows_together = std::max(rows, z.q_rows / kMostDocumentGroups + kStepRows);
    return one_after_another(heads, cached_rows / rows, rows_together / kStepRows);
}

}  // namespace megatron_sb::hopper
