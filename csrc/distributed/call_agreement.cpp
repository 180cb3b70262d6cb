#include "distributed/call_agreement.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "core/error.h"
#include "distributed/c10d_transport.h"
#include "distributed/group_properties.h"

namespace megatron_sb::distributed {
namespace {

using c10d::ProcessGroup;
using std::chrono::milliseconds, std::chrono::steady_clock;

constexpr const char* kSubject = "context_parallel_attention";
constexpr const char* kDestroyed =
    "cp_group must exist while its plans are used, got a group that was destroyed. Make a new plan";
// A waiting rank looks into the store after these pauses, which double. So short waits end soon, and long waits of many
// ranks do not load the store.
constexpr milliseconds kFirstPause{1}, kLongestPause{64};
// A rank that began to wait for data when this rank began to ask answers after the same timeout. This is its time to do
// so.
constexpr milliseconds kAnswerTime{1000};
// A thread that waits for another thread of its rank looks again after this time, notified or not. libstdc++ has a new
// condition_variable::wait(), which systems with an older libstdc++ lack. A wait until a time needs nothing new.
constexpr std::chrono::minutes kLook{1};

// What the ranks of a group publish about one number.
class Question {
  public:
    Question(ProcessGroup& group, int64_t nonce, int64_t number)
        : store_(store_of(group)),
          rank_(group.getRank()),
          size_(group.getSize()),
          prefix_(concat("megatron_sb/", std::hex, nonce, std::dec, "/", number, "/")) {}

    void publish(const Statement& mine) {
        std::string text = mine.error;
        for (const std::string& value : mine.values) text += '\0' + value;
        store_->set(key(rank_), std::vector<uint8_t>(text.begin(), text.end()));
    }

    // Returns whether all other ranks have published within `timeout` and the time to answer.
    bool wait_for_others(milliseconds timeout) {
        const std::vector<std::string> keys = keys_of(others());
        const auto deadline = steady_clock::now() + timeout + kAnswerTime;
        for (milliseconds pause = kFirstPause; !store_->check(keys); pause = std::min(2 * pause, kLongestPause)) {
            if (steady_clock::now() >= deadline) return false;
            std::this_thread::sleep_for(pause);
        }
        return true;
    }

    // Returns the other ranks that have published, or that have not.
    std::vector<int> others_that(bool have_published) {
        std::vector<int> ranks = others();
        std::erase_if(ranks, [&](int rank) { return store_->check({key(rank)}) != have_published; });
        return ranks;
    }

    // Returns the statements of all ranks. `mine` is this rank's; a rank that is not in `others` has none.
    std::vector<Statement> read(const Statement& mine, const std::vector<int>& others) {
        std::vector<Statement> by_rank(size_);
        by_rank[rank_] = mine;
        if (others.empty()) return by_rank;
        const std::vector<std::vector<uint8_t>> published = store_->multiGet(keys_of(others));
        for (size_t i = 0; i < others.size(); ++i) {
            std::vector<std::string> parts(1);
            for (const uint8_t c : published[i]) {
                c == 0 ? void(parts.emplace_back()) : parts.back().push_back(static_cast<char>(c));
            }
            by_rank[others[i]] = {parts[0], {parts.begin() + 1, parts.end()}};
        }
        return by_rank;
    }

    // This rank neither publishes nor reads again. The last rank to say so deletes the keys.
    void close() {
        const std::string num_closed = prefix_ + "closed";
        if (store_->add(num_closed, 1) < size_) return;
        for (int rank = 0; rank < size_; ++rank) store_->deleteKey(key(rank));
        store_->deleteKey(num_closed);
    }

    std::vector<int> others() const {
        std::vector<int> ranks;
        for (int rank = 0; rank < size_; ++rank) {
            if (rank != rank_) ranks.push_back(rank);
        }
        return ranks;
    }

  private:
    std::string key(int rank) const { return concat(prefix_, rank); }
    std::vector<std::string> keys_of(const std::vector<int>& ranks) const {
        std::vector<std::string> keys;
        for (const int rank : ranks) keys.push_back(key(rank));
        return keys;
    }

    const c10::intrusive_ptr<c10d::Store> store_;
    const int rank_, size_;
    const std::string prefix_;
};

// What the ranks compare: their histories, and the fields of the call.
std::vector<Field> compared_fields(const History& history, const Call& call) {
    std::vector<Field> fields = {
        {"the number of earlier calls", std::to_string(history.num_calls)},
        {"the order of earlier calls and their documents, as a checksum,", std::to_string(history.checksum)}};
    fields.insert(fields.end(), call.begin(), call.end());
    return fields;
}

Statement statement_of(const std::vector<Field>& fields) {
    Statement statement;
    for (const Field& field : fields) statement.values.push_back(field.value);
    return statement;
}

Statement error_statement(const History& history, const std::string& error) {
    return {error, {std::to_string(history.num_calls)}};
}

// Clears the errors of calls that this rank has made since. Returns a sentence for each.
std::string clear_old_errors(const History& mine, std::vector<Statement>& by_rank) {
    std::string sentences;
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
        Statement& theirs = by_rank[rank];
        if (theirs.error.empty() || std::stoll(theirs.values.at(0)) >= mine.num_calls) continue;
        sentences += concat(" An earlier call was rejected on rank ", rank, ": ", theirs.error, ".");
        theirs = {};
    }
    return sentences;
}

// Collective. Returns a random number of rank 0.
int64_t exchange_nonce(Transport& transport) {
    const auto options = at::TensorOptions(transport.control_device()).dtype(at::kLong);
    const auto random = static_cast<int64_t>(std::random_device()());
    const at::Tensor all = at::empty({transport.size(), 1}, options);
    transport.all_gather(at::full({1}, random, options), all)->wait();
    return all[0].item<int64_t>();
}

}  // namespace

// FNV-1a. The number of a call is the same on all ranks.
void History::add(const AgreedCall& call, const std::string& documents) {
    const auto mix = [this](uint64_t value) { checksum = (checksum ^ value) * 0x100000001b3; };
    ++num_calls;
    mix(static_cast<uint64_t>(call.number + 1));
    for (const char c : documents) mix(static_cast<unsigned char>(c));
}

std::shared_ptr<CallAgreement> CallAgreement::of_group(const std::string& group_name) {
    static std::mutex mutex;
    static std::map<std::string, std::shared_ptr<CallAgreement>> by_name;
    const auto group = c10d::resolve_process_group(group_name);
    {
        const std::lock_guard<std::mutex> lock(mutex);
        std::erase_if(by_name, [](const auto& entry) { return entry.second->group_.expired(); });
        const auto found = by_name.find(group_name);
        if (found != by_name.end() && found->second->group_.lock() == group) return found->second;
    }
    // Without the lock, because this waits for the other ranks.
    const int64_t nonce = exchange_nonce(*c10d_transport(group_name));
    const std::lock_guard<std::mutex> lock(mutex);
    return by_name[group_name] = std::make_shared<CallAgreement>(group, nonce);
}

CallAgreement::CallAgreement(const c10::intrusive_ptr<ProcessGroup>& group, int64_t nonce)
    : group_(group), nonce_(nonce) {}

void CallAgreement::check_group(const std::string& group_name) const {
    const auto group = group_.lock();
    bool has_name = false;
    try {
        has_name = group && c10d::resolve_process_group(group_name) == group;
    } catch (const c10::Error&) {  // no group has the name
    }
    if (!has_name) throw RuntimeFailure(kDestroyed);
}

CallPointer CallAgreement::agree(Call call, const std::string& error) {
    std::string key;
    for (const Field& field : call) {
        if (!field.is_of_batch) key += field.value + "\n";
    }
    Turn turn = {};
    {
        std::unique_lock<std::mutex> lock(mutex_);
        if (error.empty()) {
            auto found = calls_.find(key);
            // The asking thread notifies when its wait has ended, which the timeout bounds. If it failed, this one
            // asks.
            for (; found != calls_.end() && !found->second; found = calls_.find(key)) {
                decided_.wait_until(lock, std::chrono::system_clock::now() + kLook);
            }
            if (found != calls_.end()) return found->second;
            calls_[key] = nullptr;
        }
        turn = next_turn();
    }
    const auto decide = [&](const CallPointer& agreed) {
        const std::lock_guard<std::mutex> lock(mutex_);
        agreed ? void(calls_[key] = agreed) : void(error.empty() && calls_.erase(key));
        decided_.notify_all();
    };
    int64_t number = 0;
    try {
        number = ask(turn, call, error);
    } catch (...) {
        decide(nullptr);
        throw;
    }
    auto agreed = std::make_shared<const AgreedCall>(AgreedCall{std::move(call), number});
    decide(agreed);
    return agreed;
}

CallAgreement::Turn CallAgreement::next_turn() {
    return {num_new_calls_++, history_};
}

void CallAgreement::count(const AgreedCall& call, const std::string& documents) {
    const std::lock_guard<std::mutex> lock(mutex_);
    history_.add(call, documents);
}

int64_t CallAgreement::ask(Turn turn, const Call& call, const std::string& error) {
    const auto group = group_.lock();
    if (!group) throw RuntimeFailure(kDestroyed);
    const std::vector<Field> fields = compared_fields(turn.history, call);
    const Statement mine = error.empty() ? statement_of(fields) : error_statement(turn.history, error);
    const auto what = concat("context parallelism, rank ", group->getRank(), " of ", group->getSize(), ": ");
    const milliseconds timeout = timeout_of(*group);
    std::vector<Statement> by_rank;
    std::vector<int> missing;
    std::string old_errors;
    for (bool asks = group->getSize() > 1; asks;) {
        guard(what + "agreement on a call", [&] {
            Question question(*group, nonce_, turn.number);
            question.publish(mine);
            const bool complete = !error.empty() || question.wait_for_others(timeout);
            if (!complete) missing = question.others_that(false);
            if (error.empty()) by_rank = question.read(mine, complete ? question.others() : question.others_that(true));
            question.close();
        });
        const std::string found = clear_old_errors(turn.history, by_rank);
        old_errors += found;
        // All other ranks find these errors, too. They wait for this one under the next number.
        asks = !found.empty() && missing.empty();
        if (asks) {
            const std::lock_guard<std::mutex> lock(mutex_);
            turn.number = next_turn().number;
        }
    }
    if (!error.empty()) throw InvalidArgument(error);
    compare(kSubject, fields, by_rank);
    if (missing.empty()) return turn.number;
    throw RuntimeFailure(concat(what, "agreement on a call failed: rank ", missing[0], " has made no new call within ",
                                timeout.count(), " ms. ", what_is_new(call), ".", old_errors));
}

std::string CallAgreement::what_is_new(const Call& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string> fewest;
    bool any = false;
    for (const auto& [key, agreed] : calls_) {
        if (!agreed) continue;
        std::vector<std::string> differences;
        for (size_t i = 0; i < call.size(); ++i) {
            const std::string &here = call[i].value, &there = agreed->fields[i].value;
            if (here != there && !call[i].is_of_batch)
                differences.push_back(concat(call[i].name, " (", here, " here, ", there, " there)"));
        }
        if (!any || differences.size() < fewest.size()) fewest = differences;
        any = true;
    }
    if (!any) return "The ranks have agreed on no call of this group before";
    std::string text;
    for (const std::string& difference : fewest) text += (text.empty() ? "" : ", ") + difference;
    return "This call differs from the most similar call that the ranks have agreed on: " + text;
}

void CallAgreement::explain_failure(const Call& call, const std::string& failure) {
    const auto group = group_.lock();
    if (!group || group->getSize() == 1) return;
    std::vector<Field> fields;
    std::vector<Statement> by_rank;
    try {
        for (bool asks = true; asks;) {
            Turn turn = {};
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                turn = {num_new_calls_, history_};
            }
            Question question(*group, nonce_, turn.number);
            const std::vector<int> asking = question.others_that(true);
            if (asking.empty()) return;
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                if (num_new_calls_ != turn.number) return;  // another thread of this rank answers
                ++num_new_calls_;
            }
            fields = compared_fields(turn.history, call);
            const Statement mine = statement_of(fields);
            question.publish(mine);
            by_rank = question.read(mine, asking);
            question.close();
            asks = !clear_old_errors(turn.history, by_rank).empty();
        }
    } catch (const c10::Error&) {
        return;  // the store is lost as well: only the failure is known
    }
    try {
        compare(kSubject, fields, by_rank);
    } catch (const InvalidArgument& difference) {
        throw InvalidArgument(concat(difference.what(), ". This rank waited for the others: ", failure));
    }
}

}  // namespace megatron_sb::distributed
