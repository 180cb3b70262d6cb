// Tests of the agreement on calls, over a store that ranks share as threads. The names of the keys start with a nonce.
#include "distributed/call_agreement.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "messages.h"

namespace megatron_sb::distributed {
namespace {

using namespace std::chrono_literals;

// Has a timeout and no transfers: an agreement must not use them. Without "override", because torch 2.8 has no
// getBackendOptions().
class NoTransfers final : public c10d::Backend {
  public:
    NoTransfers(int rank, int size, std::chrono::milliseconds timeout)
        : Backend(rank, size), options_(c10::make_intrusive<Options>("none", timeout)) {}
    const std::string getBackendName() const { return "none"; }
    c10::intrusive_ptr<Options> getBackendOptions() { return options_; }

  private:
    c10::intrusive_ptr<Options> options_;
};

// The agreements of the ranks of one group.
struct Ranks {
    c10::intrusive_ptr<c10d::HashStore> store = c10::make_intrusive<c10d::HashStore>();
    std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
    std::vector<std::unique_ptr<CallAgreement>> agreements;

    explicit Ranks(int size, std::chrono::milliseconds timeout = 30s) {
        store->setTimeout(timeout);  // for torch 2.8
        for (int rank = 0; rank < size; ++rank) {
            groups.push_back(c10::make_intrusive<c10d::ProcessGroup>(store, rank, size));
            groups[rank]->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::CUSTOM,
                                     c10::make_intrusive<NoTransfers>(rank, size, timeout));
            agreements.push_back(std::make_unique<CallAgreement>(groups[rank], 1));
        }
    }

    // Calls agree() in a new thread. The result is "" or the message of the exception.
    std::future<std::string> agree(int rank, const std::string& dtype, const std::string& error = "") {
        return std::async(std::launch::async, [this, rank, dtype, error]() -> std::string {
            try {
                agreements[rank]->agree({{"comm", "p2p"}, {"dtype", dtype}}, error);
            } catch (const std::exception& thrown) {
                return thrown.what();
            }
            return "";
        });
    }

    // Makes a call that the ranks have agreed on.
    void make(int rank, const std::string& dtype) {
        agreements[rank]->count(*agreements[rank]->agree({{"comm", "p2p"}, {"dtype", dtype}}, ""));
    }

    // Makes new calls on both of two ranks.
    void make_new(const std::vector<std::string>& dtypes) {
        for (const std::string& dtype : dtypes) {
            auto first = agree(0, dtype), second = agree(1, dtype);
            EXPECT_EQ(first.get() + second.get(), "");
            for (const int rank : {0, 1}) make(rank, dtype);
        }
    }

    // Waits until the ranks have published this many calls.
    void wait_for_keys(int64_t count) const {
        while (store->getNumKeys() < count) std::this_thread::sleep_for(1ms);
    }
};

TEST(CallAgreement, AKnownCallNeedsNoOtherRankAndLeavesNoKeys) {
    Ranks ranks(2);
    auto first = ranks.agree(0, "float"), second = ranks.agree(1, "float");
    EXPECT_EQ(first.get() + second.get(), "");
    EXPECT_EQ(ranks.store->getNumKeys(), 0);
    EXPECT_EQ(ranks.agree(0, "float").get(), "");
    EXPECT_EQ(ranks.store->getNumKeys(), 0);
}

TEST(CallAgreement, EveryRankNamesWhatDiffers) {
    Ranks ranks(3);
    auto first = ranks.agree(0, "float"), second = ranks.agree(1, "float"), third = ranks.agree(2, "half");
    for (auto* rank : {&first, &second, &third}) EXPECT_TRUE(mentions(rank->get(), "dtype rank 0 2 float half"));
    EXPECT_EQ(ranks.store->getNumKeys(), 0);
}

TEST(CallAgreement, AFieldOfTheBatchIsComparedInANewCallAndDoesNotMakeOne) {
    Ranks ranks(2);
    const auto agree = [&ranks](int rank, const std::string& documents) {
        const Call call = {{"comm", "p2p"}, {"documents", documents, true}};
        return std::async(std::launch::async, [&ranks, rank, call] { return ranks.agreements[rank]->agree(call, ""); });
    };
    auto first = agree(0, "3 offsets"), second = agree(1, "4 offsets");
    EXPECT_THROW(first.get(), InvalidArgument);
    EXPECT_THROW(second.get(), InvalidArgument);
    first = agree(0, "4 offsets"), second = agree(1, "4 offsets");
    EXPECT_EQ(first.get()->number, second.get()->number);
    EXPECT_NE(agree(0, "3 offsets").get(), nullptr);  // known
    EXPECT_EQ(ranks.store->getNumKeys(), 0);
}

TEST(CallAgreement, ARejectedCallIsNamedOnTheOtherRank) {
    Ranks ranks(2);
    EXPECT_EQ(ranks.agree(1, "float", "scale must be finite, got inf").get(), "scale must be finite, got inf");
    EXPECT_TRUE(mentions(ranks.agree(0, "float").get(), "rejected rank 1 scale inf"));
    EXPECT_EQ(ranks.store->getNumKeys(), 0);
}

TEST(CallAgreement, ACallOnOneRankAloneEndsAtTheTimeout) {
    Ranks ranks(2, 10ms);
    auto first = ranks.agree(0, "float"), second = ranks.agree(1, "float");
    EXPECT_EQ(first.get() + second.get(), "");
    EXPECT_TRUE(mentions(ranks.agree(1, "half").get(), "rank 0 10 dtype half float"));
    // Rank 0 has made the known call, and its transfer has failed.
    try {
        ranks.agreements[0]->explain_failure({{"comm", "p2p"}, {"dtype", "float"}}, "the transfer failed");
        FAIL() << "explain_failure must throw";
    } catch (const InvalidArgument& error) {
        EXPECT_TRUE(mentions(error.what(), "dtype rank 0 1 float half transfer"));
    }
    EXPECT_EQ(ranks.store->getNumKeys(), 0);
    // Both ranks have used the same number, so they can agree again.
    first = ranks.agree(0, "double"), second = ranks.agree(1, "double");
    EXPECT_EQ(first.get() + second.get(), "");
}

// Rank 0 has made the known call meanwhile, and then meets the errors of rank 1 under the number of its next new call.
TEST(CallAgreement, ARejectedCallMayBeRepeated) {
    Ranks ranks(2);
    ranks.make_new({"float"});
    for (int i = 0; i < 2; ++i) EXPECT_NE(ranks.agree(1, "float", "scale must be finite, got inf").get(), "");
    for (const int rank : {0, 1}) ranks.make(rank, "float");
    ranks.make_new({"half", "double"});
    EXPECT_EQ(ranks.store->getNumKeys(), 0);
}

TEST(CallAgreement, AnErrorIsQuotedUntilTheCallIsRepeated) {
    Ranks ranks(2, 10ms);
    const Call known = {{"comm", "p2p"}, {"dtype", "float"}};
    ranks.make_new({"float"});
    EXPECT_NE(ranks.agree(1, "float", "scale must be finite, got inf").get(), "");
    for (const int rank : {0, 1}) ranks.make(rank, "float");
    EXPECT_NO_THROW(ranks.agreements[0]->explain_failure(known, "a rank is lost"));
    EXPECT_NE(ranks.agree(1, "float", "scale must be finite, got nan").get(), "");
    try {
        ranks.agreements[0]->explain_failure(known, "the transfer failed");
        FAIL() << "explain_failure must throw";
    } catch (const InvalidArgument& error) {
        EXPECT_TRUE(mentions(error.what(), "rejected rank 1 nan transfer"));
    }
    EXPECT_EQ(ranks.store->getNumKeys(), 0);
}

// Rank 0 did not wait for the data of rank 1, as over NCCL.
TEST(CallAgreement, ARankThatWaitsForARejectedOneNamesTheError) {
    Ranks ranks(2, 10ms);
    ranks.make_new({"float"});
    EXPECT_NE(ranks.agree(1, "float", "scale must be finite, got inf").get(), "");
    ranks.make(0, "float");
    EXPECT_TRUE(mentions(ranks.agree(0, "half").get(), "rank 1 no new call rejected scale inf"));
}

TEST(CallAgreement, ANewCallShowsThatEarlierCallsDiffered) {
    Ranks ranks(2);
    ranks.make_new({"float", "half"});
    ranks.make(0, "float");
    auto first = ranks.agree(0, "double"), second = ranks.agree(1, "double");
    for (auto* rank : {&first, &second}) {
        EXPECT_TRUE(mentions(rank->get(), "disagree the number of earlier calls rank 0 3 rank 1 2"));
    }
    ranks.make(1, "half");  // now the numbers are equal
    first = ranks.agree(0, "double"), second = ranks.agree(1, "double");
    for (auto* rank : {&first, &second}) EXPECT_TRUE(mentions(rank->get(), "disagree order of earlier calls"));
}

TEST(CallAgreement, AFailureWithoutAQuestionIsNotExplained) {
    Ranks ranks(2);
    EXPECT_NO_THROW(ranks.agreements[0]->explain_failure({{"comm", "p2p"}, {"dtype", "float"}}, "a rank is lost"));
    EXPECT_EQ(ranks.store->getNumKeys(), 0);
}

// Two threads of each rank make two new calls, in another order on rank 1. A lock that is held during the wait would
// make this a deadlock.
TEST(CallAgreement, ThreadsInAnotherOrderGetAnError) {
    Ranks ranks(2);
    auto first = ranks.agree(0, "float");
    ranks.wait_for_keys(1);
    auto second = ranks.agree(0, "half");
    ranks.wait_for_keys(2);
    EXPECT_TRUE(mentions(ranks.agree(1, "half").get(), "dtype float half"));
    EXPECT_TRUE(mentions(ranks.agree(1, "float").get(), "dtype float half"));
    EXPECT_TRUE(mentions(first.get(), "dtype float half"));
    EXPECT_TRUE(mentions(second.get(), "dtype float half"));
}

// On rank 0 the second thread may find that the call is known, on rank 1 that another thread asks. Neither uses a
// number.
TEST(CallAgreement, ThreadsThatMakeTheSameNewCallAskOnce) {
    Ranks ranks(2);
    std::vector<std::future<std::string>> results;
    for (const int rank : {0, 1, 0, 1, 1, 0}) results.push_back(ranks.agree(rank, "float"));
    for (auto& result : results) EXPECT_EQ(result.get(), "");
    auto first = ranks.agree(0, "half"), second = ranks.agree(1, "half");
    EXPECT_EQ(first.get() + second.get(), "");
}

}  // namespace
}  // namespace megatron_sb::distributed
