// Exceptions of the folders that do not use Torch. In Python they become ValueError and RuntimeError.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace megatron_sb {

// An invalid argument. The message names the argument, its value and what is expected.
class InvalidArgument : public std::invalid_argument {
  public:
    using std::invalid_argument::invalid_argument;
};

// A failure of a valid call: a lost peer, a time-out, a failed launch.
class RuntimeFailure : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// Returns the text of all parts, one after the other.
template <class... Parts>
std::string concat(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}

}  // namespace megatron_sb
