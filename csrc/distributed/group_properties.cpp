#include "distributed/group_properties.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/version.h>

#include <algorithm>

namespace megatron_sb::distributed {

using c10d::ProcessGroup;
using std::chrono::milliseconds;

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9

namespace {

// torch 2.8 has no getter of the store. A derived class may name the protected member.
struct GroupWithStore : ProcessGroup {
    static constexpr auto kStore = &GroupWithStore::store_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> store_of(const ProcessGroup& group) {
    return group.*GroupWithStore::kStore;
}

// torch 2.8 has the timeout of a backend in Python only. megatron_sb/ops/group_timeout.py registers this operator. A
// C++ program has no such operator and uses the timeout of the store, which is that of init_process_group in Python.
milliseconds timeout_of(ProcessGroup& group) {
    const auto group_timeout = c10::Dispatcher::singleton().findSchema({"megatron_sb::group_timeout", ""});
    if (!group_timeout) return std::min<milliseconds>(kBackendDefaultTimeout, store_of(group)->getTimeout());
    torch::jit::Stack stack{group.getGroupName()};
    group_timeout->callBoxed(stack);
    return std::min<milliseconds>(kBackendDefaultTimeout, milliseconds(stack.at(0).toInt()));
}

#else

c10::intrusive_ptr<c10d::Store> store_of(const ProcessGroup& group) {
    return group.getStore();
}

milliseconds timeout_of(ProcessGroup& group) {
    milliseconds shortest = kBackendDefaultTimeout;
    for (const c10::Device& device : group.getDeviceTypes()) {
        try {
            const auto options = group.getBackend(device.type())->getBackendOptions();
            if (options) shortest = std::min(shortest, options->timeout);  // the backend "fake" has none
        } catch (const c10::Error&) {
            continue;
        }
    }
    return shortest;
}

#endif

}  // namespace megatron_sb::distributed
