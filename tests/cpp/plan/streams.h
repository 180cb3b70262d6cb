// Streams of packed documents for the tests of the plan.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "plan/partition.h"

namespace megatron_sb::plan {

struct Stream {
    std::string name;
    Packing packing;
    int64_t seq_len;
    std::optional<std::vector<int64_t>> cu_seqlens;

    Partition partition(Layout layout, int size) const { return {layout, packing, size, seq_len, cu_seqlens}; }

    // The document of each row. For rows after the last document it is the number of documents.
    std::vector<int> documents() const {
        const std::vector<int64_t> bounds = cu_seqlens.value_or(std::vector<int64_t>{0, seq_len});
        std::vector<int> of_row(seq_len, static_cast<int>(bounds.size()) - 1);
        for (size_t i = 0; i + 1 < bounds.size(); ++i) {
            for (int64_t row = bounds[i]; row < bounds[i + 1]; ++row) of_row[row] = static_cast<int>(i);
        }
        return of_row;
    }
};

// A dense stream, and two packed streams for each packing and kind of lengths. The packed streams have empty documents
// and rows after the last document. "aligned" lengths are multiples of 2 * size. The others include 1. The last streams
// have lengths that do not divide among the ranks, and one of them has fewer rows than ranks.
inline std::vector<Stream> streams(int size, unsigned seed) {
    std::mt19937 random(seed);
    const int64_t multiple = 2 * size;
    std::vector<int64_t> aligned{0, 0}, ragged{0, 0};
    for (int i = 0; i < 5; ++i) aligned.push_back(aligned.back() + multiple * (random() % 4));
    for (int i = 0; i < 7; ++i) ragged.push_back(ragged.back() + random() % 9);
    ragged.push_back(ragged.back() + 1);
    const int64_t ragged_len = (ragged.back() / multiple + 1) * multiple;
    return {
        {"dense", Packing::kPerDocument, multiple * 3, std::nullopt},
        {"per_document, aligned", Packing::kPerDocument, aligned.back() + multiple, aligned},
        {"per_document, aligned, with a long tail", Packing::kPerDocument, aligned.back() + 3 * multiple, aligned},
        {"per_document", Packing::kPerDocument, ragged_len, ragged},
        {"per_document with a long tail", Packing::kPerDocument, ragged_len + 2 * multiple, ragged},
        {"whole_stream", Packing::kWholeStream, ragged_len, ragged},
        {"whole_stream with a long tail", Packing::kWholeStream, ragged_len + 2 * multiple, ragged},
        {"dense, of any length", Packing::kPerDocument, multiple * 3 + size + size / 2, std::nullopt},
        {"dense, with fewer rows than ranks", Packing::kPerDocument, size / 2 + 1, std::nullopt},
        {"per_document, of any length", Packing::kPerDocument, ragged.back(), ragged},
        {"whole_stream, of any length", Packing::kWholeStream, ragged_len + 1, ragged},
    };
}

}  // namespace megatron_sb::plan
