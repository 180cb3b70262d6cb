// Ranks as threads of one process that share mailboxes: the driver's transport in tests.
#pragma once

#include <chrono>
#include <memory>

#include "distributed/transport.h"

namespace megatron_sb::distributed {

class Mailboxes;

class InProcessGroup {
  public:
    // A wait longer than `timeout` throws RuntimeFailure.
    InProcessGroup(int size, std::chrono::milliseconds timeout);
    // One for each rank, each used by one thread.
    std::unique_ptr<Transport> transport(int rank) const;

  private:
    std::shared_ptr<Mailboxes> mailboxes_;
};

}  // namespace megatron_sb::distributed
