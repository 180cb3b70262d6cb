// The state of a ContextParallelPlan.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "distributed/agreement.h"
#include "distributed/rank_plan.h"
#include "megatron_sb/context_parallel.h"
#include "plan/partition.h"

namespace megatron_sb {

class ContextParallelPlan::State {
  public:
    State(std::string group_name, int rank, plan::Partition partition, plan::Packing packing, bool packed);

    const std::string group_name;
    const int rank;
    const plan::Partition partition;
    const plan::Packing packing;
    const bool packed;

    // Returns the tables on a device, for `num_exchanging` ranks that exchange heads (rank_plan.h). The first call
    // uploads them.
    std::shared_ptr<const distributed::RankPlan> rank_plan(c10::Device device, int num_exchanging);
    // Checks, once for each set of values, that all ranks call with the same values. After the first agreement, a
    // non-empty `error` (see agree()) is thrown on this rank only. Other ranks that wait for this rank then throw after
    // the timeout of the group.
    void agree_on_call(const std::vector<distributed::Field>& fields, const std::string& error);

  private:
    std::mutex mutex_;
    // By device and num_exchanging.
    std::map<std::pair<std::string, int>, std::shared_ptr<const distributed::RankPlan>> rank_plans_;
    std::set<std::string> agreed_;
};

}  // namespace megatron_sb
