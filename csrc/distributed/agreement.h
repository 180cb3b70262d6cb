// One small collective that checks whether all ranks of a group pass the same values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"
#include "distributed/transport.h"

namespace megatron_sb::distributed {

struct Field {
    std::string name;
    std::string value;  // only the first 119 bytes are compared and shown
};

// Returns a number that stands for a list in a field, because the list may be too long.
uint64_t checksum(const std::vector<int64_t>& values);

class Disagreement : public InvalidArgument {
  public:
    Disagreement(const std::string& what, std::string field) : InvalidArgument(what), field_(std::move(field)) {}
    const std::string& field() const { return field_; }

  private:
    std::string field_;
};

// All ranks pass fields of the same names. If a value differs, every rank throws Disagreement, which names the field,
// two ranks and their values. If a rank passes a non-empty `error`, every rank throws InvalidArgument with that error.
// Blocks the host.
void agree(Transport& transport, const std::string& subject, const std::vector<Field>& fields,
           const std::string& error);

}  // namespace megatron_sb::distributed
