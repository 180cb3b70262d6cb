// The parts of a key tile in the Hopper backward.
#if defined(SB_WITH_CUDA)

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "kernels/hopper/bwd_parts.h"

namespace megatron_sb::hopper {
namespace {

TileParts parts_of(int length, int heads, int kv_heads, int batch = 1, int segments = 1, int head_dim = 128) {
    const Sizes sizes = {Dtype::kBFloat16, 0, batch, heads, kv_heads, length, length, head_dim, head_dim};
    return choose_tile_parts(sizes, segments);
}

TEST(TileParts, EachHeadAndStepIsInOnePart) {
    for (const auto& [length, heads] : {std::pair(16384, 8), {16384, 7}, {8192, 1}, {16384, 2}, {2048, 71}, {4096, 12}})
        for (const int num_steps : {1, 2, 7, 16, 17, 128, 256})
            for (int oldest = 0; oldest < num_steps; ++oldest) {
                const TileParts parts = parts_of(length, heads, 1);
                ASSERT_GT(parts.count(), 1);
                std::vector<int> count(heads * num_steps);
                for (int part = 0; part < parts.count(); ++part) {
                    const PartRange h = parts.heads_of(part, heads), steps = parts.steps_of(part, num_steps, oldest);
                    for (int i = h.begin; i < h.end; ++i)
                        for (int step = steps.begin; step < steps.end; ++step) ++count[i * num_steps + step];
                    const bool all = h.end - h.begin == heads && steps.begin == oldest && steps.end == num_steps;
                    ASSERT_EQ(part == 0 && all, part == 0 && parts.is_whole(num_steps, oldest));
                }
                for (int i = 0; i < heads * num_steps; ++i) ASSERT_EQ(count[i], i % num_steps >= oldest ? 1 : 0);
            }
}

TEST(TileParts, AreChosenWithFewTilesOnly) {
    struct Case {
        TileParts parts;
        int heads, steps;
    };
    for (const auto& [parts, heads, steps] : {
             Case{parts_of(16384, 8, 1), 4, 2}, Case{parts_of(16384, 16, 1), 4, 1}, Case{parts_of(16384, 16, 2), 2, 1},
             Case{parts_of(16384, 4, 4), 1, 2}, Case{parts_of(8192, 2, 2), 1, 3}, Case{parts_of(16384, 32, 8), 1, 1},
             Case{parts_of(65536, 8, 1), 1, 1}, Case{parts_of(4096, 12, 12, 2), 1, 1}, Case{parts_of(500, 4, 2), 1, 1},
             Case{parts_of(65536, 8, 1, 1, 64), 1, 1},                                                   // 64 documents
             Case{parts_of(16384, 8, 1, 1, 1, 256), 2, 1}, Case{parts_of(8192, 8, 1, 1, 1, 256), 4, 2},  // tiles of 64
         }) {
        EXPECT_EQ(parts.heads, heads);
        EXPECT_EQ(parts.steps, steps);
    }
}

// The bounds that README.md gives for the partial sums. Some lengths are one less than whole key tiles, because
// kMostTickets counts whole tiles only.
TEST(TileParts, OfManyKeysDoNotNeedMuchMemory) {
    for (const int keys : {1 << 10, 9855, 1 << 14, 17151, 1 << 16, 68351, 1 << 20})
        for (const int queries : {1 << 10, 2463, 4287, 1 << 14, 1 << 16})
            for (const int group : {1, 2, 4, 7, 64, 71})
                for (const int biases : {0, kBiasColumns})
                    for (const int head_dim : {128, 256}) {
                        if (biases > 0 && head_dim > 128) continue;
                        const Sizes sizes = {Dtype::kBFloat16,  int8_t(biases), 1, group, 1, queries, keys,
                                             head_dim + biases, head_dim};
                        const TileParts parts = choose_tile_parts(sizes, 1);
                        const int gates = head_dim > 128 ? 0 : 4;
                        const int64_t bytes_of_key = 8 * stored_columns(sizes) + 4 + gates;
                        const int64_t bytes = parts.count() > 1 ? keys * parts.count() * bytes_of_key : 0;
                        EXPECT_LE(bytes, biases > 0 ? 227'000'000 : 214'000'000);
                        EXPECT_LE(parts.count(), TileParts::kMostParts);
                    }
}

}  // namespace
}  // namespace megatron_sb::hopper

#endif
