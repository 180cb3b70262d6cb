// Runs the ranks of a test as threads of one process.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "distributed/in_process_transport.h"

namespace megatron_sb::distributed {

using RankFunction = std::function<void(Transport&)>;

// Runs `function` on every rank and returns the exception of each rank, or null if the rank raised none. A rank waits
// at most `timeout` for another one.
inline std::vector<std::exception_ptr> run_ranks(int size, const RankFunction& function,
                                                 std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    const InProcessGroup group(size, timeout);
    std::vector<std::exception_ptr> thrown(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                function(*group.transport(rank));
            } catch (...) {
                thrown[rank] = std::current_exception();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    return thrown;
}

inline void run_ranks_or_throw(int size, const RankFunction& function) {
    for (const std::exception_ptr& thrown : run_ranks(size, function)) {
        if (thrown) std::rethrow_exception(thrown);
    }
}

// Returns the message of an exception of type Error, or "" if there is no exception. Rethrows any other exception.
template <class Error>
std::string message_of(const std::exception_ptr& thrown) {
    if (!thrown) return "";
    try {
        std::rethrow_exception(thrown);
    } catch (const Error& error) {
        return error.what();
    }
}

}  // namespace megatron_sb::distributed
