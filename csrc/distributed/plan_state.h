// The state of a ContextParallelPlan.
#pragma once

#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "distributed/call_agreement.h"
#include "distributed/rank_plan.h"
#include "megatron_sb/context_parallel.h"
#include "plan/key_rows.h"
#include "plan/partition.h"

namespace megatron_sb {

class ContextParallelPlan::State {
  public:
    State(std::string group_name, std::shared_ptr<distributed::CallAgreement> agreement, int rank,
          plan::Partition partition, plan::Packing packing, bool packed, std::string documents);

    const std::string group_name;
    const std::shared_ptr<distributed::CallAgreement> agreement;  // of the group
    const int rank;
    const plan::Partition partition;
    const plan::Packing packing;
    const bool packed;
    const std::string documents;  // cu_seqlens, as a field that the ranks agree on
    // The counts for a layout without a ring, if they are few. comm = "auto" reads them in each call. Plans with a ring
    // do not have them.
    const std::optional<plan::KeyRowCounts> key_rows_without_ring;

    // Returns the tables on a device, for `num_exchanging` ranks that exchange heads (rank_plan.h), for use on the
    // current stream of the device. The first call uploads them and waits for the device, so that any stream can read
    // them. When a plan is freed, the allocator waits for every stream on which this function returned the tables.
    std::shared_ptr<const distributed::RankPlan> rank_plan(c10::Device device, int num_exchanging);

  private:
    struct Tables {
        std::shared_ptr<const distributed::RankPlan> plan;
        std::unordered_set<c10::Stream> streams;  // that use the tables
    };
    std::mutex mutex_;
    std::map<std::pair<std::string, int>, Tables> tables_;  // by device and num_exchanging
};

}  // namespace megatron_sb
