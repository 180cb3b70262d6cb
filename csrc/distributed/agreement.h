// One small collective by which the ranks of a group make sure that they mean the same.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"
#include "distributed/transport.h"

namespace megatron_sb::distributed {

struct Field {
    std::string name;
    std::string value;  // compared and shown up to its first 120 bytes
};

// Of a list that is too long for a field.
uint64_t checksum(const std::vector<int64_t>& values);

class Disagreement : public InvalidArgument {
  public:
    Disagreement(const std::string& what, std::string field) : InvalidArgument(what), field_(std::move(field)) {}
    const std::string& field() const { return field_; }

  private:
    std::string field_;
};

// All ranks pass fields of the same names. Where a value differs it throws Disagreement on every rank, naming the
// field, two ranks and their values; where a rank brings an `error` of its own, InvalidArgument on every rank, with
// that rank's words. Blocks the host.
void agree(Transport& transport, const std::string& subject, const std::vector<Field>& fields,
           const std::string& error);

}  // namespace megatron_sb::distributed
