// How the backward divides the work of a key tile among CTAs.
//
// Usually one CTA does all steps of a key tile, for all query heads of a KV head. With few key tiles and few KV heads
// this leaves CTAs without work, because the oldest tile alone has about twice the steps of an average tile. Then a
// tile is divided into parts. A part is a range of the query heads times a range of the steps. Each part is one ticket
// and has sums of dk and dv of its own, which add_parts() adds in the order of the parts (bwd_finish.cu).
//
// The ranges of steps also shorten the chains of key tiles: the carries of two ranges are independent, so a second
// chain begins in the middle of the rows. The ranges of newer steps are longer, because only they have steps in newer
// key tiles.
#pragma once

#include <algorithm>

#include "core/params.h"
#include "kernels/hopper/bwd_tiles.h"

namespace megatron_sb::hopper {

struct PartRange {
    int32_t begin, end;
};

struct TileParts {
    static constexpr int kMostRanges = 3;  // of steps
    static constexpr int kMostParts = 32;

    int32_t heads = 1;  // ranges of the query heads of a KV head
    int32_t steps = 1;  // ranges of the steps of a segment, from the newest to the oldest
    // Range n has the steps from edges[n + 1] to edges[n], in 16ths of the steps of the segment.
    int32_t edges[kMostRanges + 1] = {16, 0, 0, 0};

    SB_HOST_DEVICE int count() const { return heads * steps; }

    // The query heads of a part, counted within their KV head.
    SB_HOST_DEVICE PartRange heads_of(int part, int group) const {
        const int range = part % heads;
        return {group * range / heads, group * (range + 1) / heads};
    }
    // The steps of a part, if the steps of the segment that need the key tile are [oldest, num_steps) without skipping.
    // An older range with few such steps is empty, and the next newer one has its steps. So each step is in one range,
    // and range 0 has all steps of the newest key tiles.
    SB_HOST_DEVICE PartRange steps_of(int part, int num_steps, int oldest) const {
        const int range = part / heads, begin = num_steps * edges[range + 1] / 16, end = num_steps * edges[range] / 16;
        if (range > 0 && joins_newer(end, num_steps, oldest)) return {oldest, oldest};
        return {joins_newer(begin, num_steps, oldest) ? oldest : begin, end};
    }
    // Whether part 0 has all steps of this segment that need the key tile.
    SB_HOST_DEVICE bool is_whole(int num_steps, int oldest) const {
        return heads == 1 && joins_newer(num_steps * edges[1] / 16, num_steps, oldest);
    }

  private:
    // Whether a range that ends at `end` is so short that the next newer range has its steps.
    SB_HOST_DEVICE static bool joins_newer(int end, int num_steps, int oldest) {
        constexpr int kShortest = 8;  // at least 1/8 of the steps
        return end <= oldest || end - oldest < num_steps / kShortest;
    }
};

// Chooses the parts from the sizes and the number of segments alone. So calls that have both in common have the same
// order of sums on every GPU. The constants come from a model of tickets and carries on 132 CTAs
// (docs/design/kernels-hopper-backward.md).
inline TileParts choose_tile_parts(const Sizes& z, int num_segments) {
    constexpr int kFewTickets = 250, kManyTickets = 500, kMostTickets = 1600;  // kMostTickets bounds the workspace
    constexpr int kFewChains = 4, kManyChains = 8, kLeastSteps = 16, kStepsForThreeRanges = 1024;
    const int64_t tiles = int64_t(z.k_rows) * z.batch * z.num_kv_heads / backward_key_tile(z);
    const int64_t chains = int64_t(num_segments) * z.batch * z.num_kv_heads;
    const int group = z.num_heads / z.num_kv_heads, steps = z.q_rows / num_segments / kStepRows;
    TileParts parts;
    if (int64_t(group) * steps <= kLeastSteps) return parts;
    const auto enough = [&](int heads) {
        return tiles * heads >= kManyTickets || (tiles * heads >= kFewTickets && chains * heads >= kFewChains);
    };
    const int most_heads = std::min(group, TileParts::kMostParts);
    for (int heads = 2; heads <= most_heads && tiles * heads <= kMostTickets && !enough(parts.heads); ++heads)
        if (group % heads == 0 || group >= 4 * heads) parts.heads = heads;  // ranges of about equal size
    const int64_t tickets = tiles * parts.heads, parallel_chains = chains * parts.heads;
    const int heads_of_part = group / parts.heads;
    static_assert(kManyChains * TileParts::kMostRanges <= TileParts::kMostParts, "parts.heads is at most kManyChains");
    if (heads_of_part > 2 || parallel_chains > kManyChains || heads_of_part * steps <= kLeastSteps) return parts;
    if (parallel_chains * heads_of_part * steps < kStepsForThreeRanges && tickets * 3 <= kMostTickets)
        parts.steps = 3, parts.edges[1] = 9, parts.edges[2] = 4;
    else if (tickets * 2 <= kMostTickets)
        parts.steps = 2, parts.edges[1] = 6;
    return parts;
}

}  // namespace megatron_sb::hopper
