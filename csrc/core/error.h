// Exceptions of the floors that know no Torch; the operators turn them into ValueError and RuntimeError.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace megatron_sb {

// An argument that can never work: the message names it, its value and what is allowed.
class InvalidArgument : public std::invalid_argument {
  public:
    using std::invalid_argument::invalid_argument;
};

// Something that was right and failed on the way: a lost peer, a time-out.
class RuntimeFailure : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}

}  // namespace megatron_sb
