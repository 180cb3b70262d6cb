// Settings from environment variables.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "core/error.h"

namespace megatron_sb {

// Returns the integer that an environment variable holds, or `otherwise` if the variable is not set. Throws
// InvalidArgument if its value is not an integer from `least` to `most`.
inline int64_t integer_of_environment(const char* name, int64_t otherwise, int64_t least, int64_t most) {
    const char* const text = std::getenv(name);
    if (text == nullptr) return otherwise;
    char* end = nullptr;
    const long long value = std::strtoll(text, &end, 10);
    if (end == text || *end != 0 || value < least || value > most)
        throw InvalidArgument(concat(name, " must be an integer from ", least, " to ", most, ", got '", text, "'"));
    return value;
}

}  // namespace megatron_sb
