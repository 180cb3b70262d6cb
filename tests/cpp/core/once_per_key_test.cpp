#include "core/once_per_key.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace megatron_sb {
namespace {

TEST(OncePerKey, ThreadsComputeEachValueOnce) {
    OncePerKey<int, int> squares;
    std::atomic<int> computed = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i)
        threads.emplace_back([&] {
            for (int key = 0; key < 100; ++key)
                EXPECT_EQ(squares.get(key, [&] { return ++computed, key * key; }), key * key);
        });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(computed, 100);
}

TEST(OncePerKey, FailureIsNotKept) {
    OncePerKey<int, int> values;
    EXPECT_THROW(values.get(1, []() -> int { throw std::runtime_error("no device"); }), std::runtime_error);
    EXPECT_EQ(values.get(1, [] { return 5; }), 5);
}

}  // namespace
}  // namespace megatron_sb
