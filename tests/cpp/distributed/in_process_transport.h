// A transport for the tests of the driver. Ranks are threads of one process, which share mailboxes.
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
    // The transport of a rank, for one thread.
    std::unique_ptr<Transport> transport(int rank) const;

  private:
    std::shared_ptr<Mailboxes> mailboxes_;
};

}  // namespace megatron_sb::distributed
