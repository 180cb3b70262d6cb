// What a ContextParallelPlan holds.
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

    // Tables on a device, for so many ranks that exchange heads (rank_plan.h); the first call uploads them.
    std::shared_ptr<const distributed::RankPlan> on(c10::Device device, int num_exchanging);
    // Makes sure, once for each set of values, that the ranks call with the same ones. `error`: see agree(); once
    // something has been agreed, it is thrown here alone, and ranks that wait for this one end by their time-out.
    void agree_on_call(const std::vector<distributed::Field>& fields, const std::string& error);

  private:
    std::mutex mutex_;
    std::map<std::pair<std::string, int>, std::shared_ptr<const distributed::RankPlan>> made_;
    std::set<std::string> agreed_;
};

}  // namespace megatron_sb
