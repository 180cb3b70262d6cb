// Which key chunks a rank holds at each step of the ring, and in which order they may be folded: pure functions of
// (layout, size, rank, step).
//
// The forward must meet the keys of a row newest to oldest and the backward oldest to newest. With `contiguous` one
// lane of chunks turns towards newer ranks in the forward, so that rank r meets chunks r, r - 1, .. 0, and the other
// way in the backward. With `zigzag` a rank holds a low and a high chunk, and the two move in opposite directions
// (counter-rotation): the lows as above, and the highs towards lower ranks, so that rank r meets the highs of ranks
// r, r + 1, .. size - 1. A rank's keys then come in at most three runs, each in order, that are folded at the end:
//
//     run 0: the highs up to its own     run 1: the lows above its own     run 2: the lows up to its own
//
// In the backward both directions are swapped, and a lane starts one exchange away from home and ends there.
#pragma once

#include "plan/partition.h"

namespace megatron_sb::plan {

enum class Pass : int8_t { kForward, kBackward };

class Schedule {
  public:
    Schedule(Layout layout, int size) : layout_(layout), size_(size) {}

    int size() const { return size_; }
    int num_steps() const { return size_; }
    int num_lanes() const { return layout_ == Layout::kZigzag ? 2 : 1; }
    int num_runs() const { return layout_ == Layout::kZigzag ? 3 : 1; }

    // The chunk of a lane that a rank owns.
    int home_chunk(int lane, int rank) const { return lane == 0 ? rank : 2 * size_ - 1 - rank; }
    // The ranks that a lane's chunk goes to, and comes from, after each step.
    int next_rank(int lane, Pass pass, int rank) const { return wrap(rank + direction(lane, pass)); }
    int previous_rank(int lane, Pass pass, int rank) const { return wrap(rank - direction(lane, pass)); }
    // The chunk of a lane that a rank holds during a step.
    int chunk(int lane, Pass pass, int rank, int step) const;
    // The run that a key chunk belongs to at a rank, 0 the newest; -1 where none of the rank's queries sees it.
    int run(int rank, int chunk) const;

  private:
    int direction(int lane, Pass pass) const { return (lane == 0) == (pass == Pass::kForward) ? 1 : -1; }
    int wrap(int rank) const { return (rank % size_ + size_) % size_; }

    Layout layout_;
    int size_;
};

}  // namespace megatron_sb::plan
