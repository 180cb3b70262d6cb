// Values that are computed at their first use and kept until the process ends.
#pragma once

#include <map>
#include <mutex>

namespace megatron_sb {

// Holds one value for each key. Threads can call get() at the same time: the mutex orders them, so each value is
// computed once.
template <class Key, class Value>
class OncePerKey {
  public:
    // Returns the value of `key`. The first call computes it. If compute() throws, no value is kept.
    template <class Compute>
    Value get(const Key& key, const Compute& compute) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = values_.find(key);
        if (found != values_.end()) return found->second;
        return values_.emplace(key, compute()).first->second;
    }

  private:
    std::mutex mutex_;
    std::map<Key, Value> values_;
};

}  // namespace megatron_sb
