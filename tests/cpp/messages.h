// Checks messages of errors by the arguments and values in them, so that the sentences can be changed.
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <sstream>
#include <string>

namespace megatron_sb {

// Succeeds if `message` contains every word of `words`, which spaces separate. A word matches as a whole: "2" does not
// match "24".
inline testing::AssertionResult mentions(const std::string& message, const std::string& words) {
    const auto is_part_of_word = [&message](size_t i) {
        return i < message.size() && (std::isalnum(static_cast<unsigned char>(message[i])) || message[i] == '_');
    };
    std::istringstream list(words);
    for (std::string word; list >> word;) {
        size_t begin = message.find(word);
        while (begin != std::string::npos &&
               ((begin > 0 && is_part_of_word(begin - 1)) || is_part_of_word(begin + word.size()))) {
            begin = message.find(word, begin + 1);
        }
        if (begin == std::string::npos) return testing::AssertionFailure() << word << " is not in: " << message;
    }
    return testing::AssertionSuccess();
}

}  // namespace megatron_sb
