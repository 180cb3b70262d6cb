// The state of a ContextParallelPlan.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "distributed/call_agreement.h"
#include "distributed/rank_plan.h"
#include "megatron_sb/context_parallel.h"
#include "plan/partition.h"

namespace megatron_sb {

class ContextParallelPlan::State {
  public:
    State(std::string group_name, std::shared_ptr<distributed::CallAgreement> agreement, int rank,
          plan::Partition partition, plan::Packing packing, bool packed);

    const std::string group_name;
    const std::shared_ptr<distributed::CallAgreement> agreement;  // of the group
    const int rank;
    const plan::Partition partition;
    const plan::Packing packing;
    const bool packed;

    // Returns the tables on a device, for `num_exchanging` ranks that exchange heads (rank_plan.h). The first call
    // uploads them.
    std::shared_ptr<const distributed::RankPlan> rank_plan(c10::Device device, int num_exchanging);

  private:
    std::mutex mutex_;
    // By device and num_exchanging.
    std::map<std::pair<std::string, int>, std::shared_ptr<const distributed::RankPlan>> rank_plans_;
};

}  // namespace megatron_sb
