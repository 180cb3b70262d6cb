#include "distributed/group_record.h"

#include <cstddef>

namespace megatron_sb::distributed {

std::vector<at::Tensor> flatten(const std::vector<GroupRecord>& records) {
    std::vector<at::Tensor> tensors;
    for (const GroupRecord& record : records) {
        for (const auto* part : {&record.restart_edge, &record.restart_mass, &record.mass_in, &record.older_o}) {
            tensors.insert(tensors.end(), part->begin(), part->end());
        }
        tensors.insert(tensors.end(), {record.k, record.v});
    }
    return tensors;
}

std::vector<GroupRecord> unflatten(const SegmentTables& tables, const std::vector<at::Tensor>& tensors) {
    std::vector<GroupRecord> records;
    for (auto next = tensors.begin(); next != tensors.end();) {
        const auto read = [&next](size_t count) {
            const auto begin = next;
            next += static_cast<std::ptrdiff_t>(count);
            return std::vector<at::Tensor>(begin, next);
        };
        GroupRecord record;
        record.restart_edge = read(tables.segments.size());
        record.restart_mass = read(tables.segments.size());
        record.mass_in = read(tables.runs.size());
        record.older_o = read(tables.runs.size());
        record.k = *next++;
        record.v = *next++;
        records.push_back(std::move(record));
    }
    return records;
}

}  // namespace megatron_sb::distributed
