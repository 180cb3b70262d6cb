// Checks that the ranks of a process group make the same calls of context_parallel_attention.
//
// A call that the ranks have agreed on is known. It needs no communication: a rank that makes it sends its data at
// once. So a rank for which a call is new must not ask over the group, where its question would meet that data. It asks
// over the group's store, in this protocol:
//
// - Each rank numbers its new calls. In new call n it publishes its fields under (nonce, n, rank), waits for the fields
//   of the other ranks under n, and compares. All ranks compare the same fields, so all of them throw or none.
// - A rank with an invalid argument publishes its error instead, and does not wait.
// - A rank that makes a known call does not publish. The asking rank then waits for it until the timeout of the group,
//   while this rank waits for data. When this rank's wait for data fails, it looks for fields under its own next number
//   (explain_failure), publishes its known call there, and both name what differs.
// - Under each number, each rank counts itself when it is done. The last one deletes the keys.
// - A rank also publishes its history: how many calls it has made, and a checksum of their order and of the documents
//   of their plans. Ranks with different histories have exchanged data of different calls, so they throw.
// - A rank with an invalid argument may repeat its call with a valid argument. If the call is known, the other ranks
//   have not asked, and the repeated call completes their calls. Later they find the published error under the number
//   of their next new call. The error is out of date, because its rank had made fewer calls at that time. All ranks
//   then skip this number.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "distributed/agreement.h"

namespace megatron_sb::distributed {

using Call = std::vector<Field>;

// A call that the ranks have agreed on, and the number under which they have.
struct AgreedCall {
    Call fields;
    int64_t number;
};
using CallPointer = std::shared_ptr<const AgreedCall>;

// The calls that a rank has made. Equal on all ranks between two calls, if these make the same calls.
struct History {
    int64_t num_calls = 0;
    uint64_t checksum = 0;

    // documents: of the plan, as text.
    void add(const AgreedCall& call, const std::string& documents);
};

class CallAgreement {
  public:
    // Returns the agreement of a group, which all its plans share. The first call for a group is a collective of the
    // group, in which rank 0 sends the nonce. The nonce tells the keys of this group from those that an earlier group
    // of the same name has left in the store.
    static std::shared_ptr<CallAgreement> of_group(const std::string& group_name);

    CallAgreement(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t nonce);

    // Throws RuntimeFailure unless this is the agreement of the group that has the name now. A group that was destroyed
    // leaves its name to the next one, which may have other ranks.
    void check_group(const std::string& group_name) const;

    // Returns at once if the call is known. Else waits until all ranks have made a new call, at most for the timeout of
    // the group. Throws InvalidArgument as compare() does, or RuntimeFailure, which names what is new, after the
    // timeout. With a non-empty `error`, publishes it for the ranks that ask, and throws InvalidArgument with it.
    CallPointer agree(Call call, const std::string& error);

    // Call this when the transfers of a call have been posted. A call that fails before that may be repeated.
    void count(const AgreedCall& call, const std::string& documents = "");

    // Call this on a rank whose transfer of a known call has failed. If another rank asks about a new call, throws
    // InvalidArgument, which names what differs and quotes the failure.
    void explain_failure(const Call& call, const std::string& failure);

  private:
    // A number of this rank for a new call, and what it had done before.
    struct Turn {
        int64_t number;
        History history;
    };

    Turn next_turn();  // with mutex_ held
    // Returns the number under which the ranks have agreed.
    int64_t ask(Turn turn, const Call& call, const std::string& error);
    std::string what_is_new(const Call& call);

    // Weak: the store of a destroyed group must close.
    const c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
    const int64_t nonce_;
    // Guards the members below. No thread holds it while it waits for another rank.
    std::mutex mutex_;
    std::condition_variable decided_;  // notified when a thread has finished asking
    // By the values of the fields that are not of a batch. Null: a thread is asking, and the other threads that make
    // this call wait for it.
    std::map<std::string, CallPointer> calls_;
    int64_t num_new_calls_ = 0;
    History history_;
};

}  // namespace megatron_sb::distributed
