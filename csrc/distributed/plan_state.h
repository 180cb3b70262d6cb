// What a ContextParallelPlan holds.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
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

    // Tables on a device; the first call for it uploads them.
    std::shared_ptr<const distributed::RankPlan> on(c10::Device device);
    // Makes sure, once for each set of values, that the ranks call with the same ones. `error`: see agree().
    void agree_on_call(const std::vector<distributed::Field>& fields, const std::string& error);

  private:
    std::mutex mutex_;
    std::unordered_map<c10::Device, std::shared_ptr<const distributed::RankPlan>> by_device_;
    std::set<std::string> agreed_;
};

}  // namespace megatron_sb
