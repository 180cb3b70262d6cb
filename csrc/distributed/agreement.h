// Checks whether all ranks of a group pass the same values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "distributed/transport.h"

namespace megatron_sb::distributed {

struct Field {
    const char* name;
    std::string value;
    bool is_of_batch = false;  // differs between calls that are otherwise the same
};

// What one rank passes. A rank that has passed nothing yet has no values.
struct Statement {
    std::string error;
    std::vector<std::string> values;
};

// Returns a number that stands for a list in a field, because the list may be too long.
uint64_t checksum(const std::vector<int64_t>& values);

// Returns such a field of cu_seqlens.
std::string summary(const std::optional<std::vector<int64_t>>& cu_seqlens);

class Disagreement : public InvalidArgument {
  public:
    Disagreement(const std::string& what, std::string field) : InvalidArgument(what), field_(std::move(field)) {}
    const std::string& field() const { return field_; }

  private:
    std::string field_;
};

// Compares the statements of the ranks, which have one value for each of `fields`. Throws InvalidArgument with the
// first error of a rank. If a value differs, throws Disagreement, which names the field, two ranks and their values.
void compare(const std::string& subject, const std::vector<Field>& fields, const std::vector<Statement>& by_rank);

// One small collective. All ranks pass fields of the same names. If they differ, every rank throws as compare() does.
// If ranks pass other subjects and as many fields, every rank throws InvalidArgument, which names two subjects.
// If a rank passes a non-empty `error`, every rank throws InvalidArgument with that error. The first 119 bytes of a
// value are compared. Returns `number` of each rank, which may differ. Blocks the host.
std::vector<int64_t> agree(Transport& transport, const std::string& subject, const std::vector<Field>& fields,
                           const std::string& error, int64_t number = 0);

}  // namespace megatron_sb::distributed
