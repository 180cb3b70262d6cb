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

void agree(Transport& transport, const std::string& subject, const std::vector<Field>& fields,
           const std::string& error) {
    const int64_t bytes = kErrorBytes + fields.size() * kValueBytes;
    const at::Tensor mine = at::zeros({bytes}, at::kByte);
    char* text = reinterpret_cast<char*>(mine.data_ptr<uint8_t>());
    const auto write = [&text](const std::string& value, size_t capacity) {
        std::memcpy(text, value.data(), std::min(value.size(), capacity - 1));
        text += capacity;
    };
    write(error, kErrorBytes);
    for (const Field& field : fields) write(field.value, kValueBytes);

    at::Tensor all =
        at::empty({transport.size(), bytes}, at::TensorOptions(transport.control_device()).dtype(at::kByte));
    transport.all_gather(mine.to(transport.control_device()), all)->wait();
    all = all.cpu();
    const auto text_of = [&](int rank, size_t offset) {
        return std::string(reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>()) + rank * bytes + offset);
    };
    if (!error.empty()) throw InvalidArgument(error);
    for (int rank = 0; rank < transport.size(); ++rank) {
        const std::string theirs = text_of(rank, 0);
        if (!theirs.empty()) throw InvalidArgument(concat(subject, " was rejected on rank ", rank, ": ", theirs));
    }
    for (size_t i = 0; i < fields.size(); ++i) {
        const size_t offset = kErrorBytes + i * kValueBytes;
        for (int rank = 1; rank < transport.size(); ++rank) {
            if (text_of(rank, offset) == text_of(0, offset)) continue;
            throw Disagreement(concat("the ranks disagree on ", fields[i].name, " of ", subject, ": rank 0 has ",
                                      text_of(0, offset), ", rank ", rank, " has ", text_of(rank, offset)),
                               fields[i].name);
        }
    }
}

}  // namespace megatron_sb::distributed
