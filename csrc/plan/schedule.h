// The ring schedule: which key chunks a rank holds at each step. Pure functions of (layout, size, rank, step). The
// balanced layout has no ring: its chunks interleave, so no order of chunks is the order of keys for all queries.
//
// The forward must process the keys of a row from newest to oldest, and the backward from oldest to newest.
// - contiguous: one lane of chunks moves to the next higher rank at each step of the forward. Rank r gets chunks
//   r, r - 1, .. 0.
// - zigzag: a rank holds a low and a high chunk, which form two lanes that move in opposite directions. The low chunks
//   move as above. The high chunks move to the next lower rank, and rank r gets those of ranks r, r + 1, .. size - 1.
// In the backward each lane moves in the other direction. It starts one exchange away from its home rank and ends at
// its home rank.
//
// A run is a sequence of chunks that a rank gets in order, in the forward from newest to oldest. With zigzag there are
// at most three runs. Their results are combined at the end:
//     run 0: the high chunks of ranks r .. size - 1     run 1: the low chunks above r     run 2: the low chunks 0 .. r
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

    // Returns the chunk of a lane that a rank owns.
    int home_chunk(int lane, int rank) const { return lane == 0 ? rank : 2 * size_ - 1 - rank; }
    // After each step a rank sends its chunk of a lane to next_rank and receives one from previous_rank.
    int next_rank(int lane, Pass pass, int rank) const { return wrap(rank + direction(lane, pass)); }
    int previous_rank(int lane, Pass pass, int rank) const { return wrap(rank - direction(lane, pass)); }
    // Returns the chunk of a lane that a rank holds during a step.
    int chunk(int lane, Pass pass, int rank, int step) const;
    // Returns the run of a key chunk on a rank, 0 for the newest, or -1 if no query of the rank sees the chunk.
    int run(int rank, int chunk) const;

  private:
    int direction(int lane, Pass pass) const { return (lane == 0) == (pass == Pass::kForward) ? 1 : -1; }
    int wrap(int rank) const { return (rank % size_ + size_) % size_; }

    Layout layout_;
    int size_;
};

}  // namespace megatron_sb::plan
