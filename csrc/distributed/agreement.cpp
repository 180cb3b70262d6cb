#include "distributed/agreement.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

namespace megatron_sb::distributed {
namespace {

constexpr size_t kErrorBytes = 1024, kValueBytes = 120;

}  // namespace

// FNV-1a.
uint64_t checksum(const std::vector<int64_t>& values) {
    uint64_t hash = 0xcbf29ce484222325;
    for (const int64_t value : values) hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3;
    return hash;
}

std::string summary(const std::optional<std::vector<int64_t>>& cu_seqlens) {
    if (!cu_seqlens) return "none";
    return concat(cu_seqlens->size(), " offsets of checksum ", checksum(*cu_seqlens));
}

void compare(const std::string& subject, const std::vector<Field>& fields, const std::vector<Statement>& by_rank) {
    size_t first = by_rank.size();  // the first rank that has passed values
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
        const Statement& theirs = by_rank[rank];
        if (!theirs.error.empty()) {
            throw InvalidArgument(concat(subject, " was rejected on rank ", rank, ": ", theirs.error));
        }
        if (first == by_rank.size() && !theirs.values.empty()) first = rank;
    }
    for (size_t i = 0; i < fields.size(); ++i) {
        for (size_t rank = first + 1; rank < by_rank.size(); ++rank) {
            const Statement& theirs = by_rank[rank];
            if (theirs.values.empty() || theirs.values[i] == by_rank[first].values[i]) continue;
            throw Disagreement(concat("the ranks disagree on ", fields[i].name, " of ", subject, ": rank ", first,
                                      " has ", by_rank[first].values[i], ", rank ", rank, " has ", theirs.values[i]),
                               fields[i].name);
        }
    }
}

std::vector<int64_t> agree(Transport& transport, const std::string& subject, const std::vector<Field>& fields,
                           const std::string& error, int64_t number) {
    const auto bytes = static_cast<int64_t>(kErrorBytes + (1 + fields.size()) * kValueBytes + sizeof(number));
    const at::Tensor mine = at::zeros({bytes}, at::kByte);
    char* text = reinterpret_cast<char*>(mine.data_ptr<uint8_t>());
    const auto write = [&text](const std::string& value, size_t capacity) {
        std::memcpy(text, value.data(), std::min(value.size(), capacity - 1));
        text += capacity;
    };
    write(subject, kValueBytes);
    write(error, kErrorBytes);
    for (const Field& field : fields) write(field.value, kValueBytes);
    std::memcpy(text, &number, sizeof(number));

    at::Tensor all =
        at::empty({transport.size(), bytes}, at::TensorOptions(transport.control_device()).dtype(at::kByte));
    transport.all_gather(mine.to(transport.control_device()), all)->wait();
    all = all.cpu();
    const char* first = reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>());
    for (int rank = 1; rank < transport.size(); ++rank) {
        const std::string of_rank_0 = first, of_rank = first + rank * bytes;
        if (of_rank == of_rank_0) continue;
        throw InvalidArgument(concat("the ranks must make the same call, got that of ", of_rank_0, " on rank 0 and of ",
                                     of_rank, " on rank ", rank));
    }
    if (!error.empty()) throw InvalidArgument(error);
    std::vector<Statement> by_rank;
    std::vector<int64_t> numbers(transport.size());
    for (int rank = 0; rank < transport.size(); ++rank) {
        const char* theirs = first + rank * bytes + kValueBytes;
        Statement statement{theirs, {}};
        theirs += kErrorBytes;
        for (size_t i = 0; i < fields.size(); ++i, theirs += kValueBytes) statement.values.emplace_back(theirs);
        by_rank.push_back(std::move(statement));
        std::memcpy(&numbers[rank], theirs, sizeof(number));
    }
    compare(subject, fields, by_rank);
    return numbers;
}

}  // namespace megatron_sb::distributed
