#include "plan/schedule.h"

namespace megatron_sb::plan {

int Schedule::chunk(int lane, Pass pass, int rank, int step) const {
    const int exchanges = pass == Pass::kForward ? step : step + 1;
    return home_chunk(lane, wrap(rank - direction(lane, pass) * exchanges));
}

int Schedule::run(int rank, int chunk) const {
    if (layout_ == Layout::kContiguous) return chunk <= rank ? 0 : -1;
    if (chunk >= size_) return chunk <= home_chunk(1, rank) ? 0 : -1;
    return chunk > rank ? 1 : 2;
}

}  // namespace megatron_sb::plan
