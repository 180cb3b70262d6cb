// Chooses the instruction set, and lays out the workspace: the list of query tiles, then the scratch of each thread.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "core/error.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/levels.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace megatron_sb::cpu {
namespace {

#define SB_LEVEL(level) \
    { #level, level::forward, level::backward, level::forward_scratch, level::backward_scratch }
const Level kBaseline = SB_LEVEL(baseline);
#if defined(SB_CPU_X86_LEVELS)
const Level kAvx2 = SB_LEVEL(avx2);
const Level kAvx512 = SB_LEVEL(avx512);
#endif
#undef SB_LEVEL

// MEGATRON_SB_CPU_LEVEL lowers the level, so that one machine can test all levels. It cannot raise the level above what
// the machine supports.
const Level& choose_level() {
    constexpr const char* kNames[] = {"avx512", "avx2", "baseline"};  // fastest first, on every machine
    const char* const wanted = std::getenv("MEGATRON_SB_CPU_LEVEL");
    const auto rank = [&](const char* name) {
        return std::find_if(std::begin(kNames), std::end(kNames),
                            [&](const char* known) { return std::strcmp(known, name) == 0; });
    };
    const auto highest = wanted == nullptr ? std::begin(kNames) : rank(wanted);
    if (highest == std::end(kNames))
        throw InvalidArgument(concat("MEGATRON_SB_CPU_LEVEL must be avx512, avx2 or baseline, got '", wanted, "'"));
    for (const Level* level : supported_levels())
        if (rank(level->name) >= highest) return *level;
    return kBaseline;
}

int most_threads() {
#if defined(_OPENMP)
    return omp_get_max_threads();
#else
    return 1;
#endif
}

constexpr int64_t kLine = 64;  // bytes; arrays of different threads share no cache line
int64_t round_up(int64_t bytes) {
    return (bytes + kLine - 1) / kLine * kLine;
}

int64_t count_tiles(const Segments& segments) {
    int64_t tiles = 0;
    for (int s = 0; s < segments.size; ++s) tiles += (int64_t(segments[s].q_len) + kRestartTile - 1) / kRestartTile;
    return tiles;
}

void write_tiles(const Segments& segments, TileIndex* tiles) {
    TileIndex* end = tiles;
    for (int s = 0; s < segments.size; ++s)
        for (int64_t first = 0; first < segments[s].q_len; first += kRestartTile) *end++ = {s, int32_t(first)};
    const auto keys = [&](const TileIndex& tile) {
        const Segment& s = segments[tile.segment];
        return std::min<int64_t>(s.k_len, int64_t(tile.first) + kRestartTile + s.q_pos_minus_k_pos);
    };
    std::stable_sort(tiles, end, [&](const TileIndex& a, const TileIndex& b) { return keys(a) > keys(b); });
}

// Where the parts of a workspace are, in bytes from its beginning.
struct Layout {
    int64_t num_tiles, tasks, kv_heads;
    int64_t num_ended, progress, tiles, scratch;
    int64_t scratch_bytes;  // of one thread

    Layout(const Sizes& sizes, const Segments& segments, int64_t bytes_of_a_thread)
        : num_tiles(count_tiles(segments)),
          tasks(num_tiles * sizes.batch * sizes.num_heads),
          kv_heads(int64_t(sizes.batch) * sizes.num_kv_heads),
          num_ended(kLine),  // after the ticket
          progress(round_up(num_ended + kv_heads * int64_t(sizeof(int64_t)))),
          tiles(round_up(progress + tasks * int64_t(sizeof(int32_t)))),
          scratch(round_up(tiles + num_tiles * int64_t(sizeof(TileIndex)))),
          scratch_bytes(bytes_of_a_thread) {}

    // The number of threads: as many as have a task and room in `bytes`, and at least one.
    int64_t threads(int64_t bytes) const {
        const int64_t room = (bytes - scratch) / scratch_bytes;
        return std::max<int64_t>(1, std::min({int64_t(most_threads()), tasks, room}));
    }
    int64_t bytes(int64_t limit) const { return scratch + threads(limit) * scratch_bytes; }

    Work work(void* workspace, const Segments& segments, int64_t limit) const {
        char* const memory = static_cast<char*>(workspace);
        std::memset(memory, 0, size_t(tiles));
        TileIndex* const list = reinterpret_cast<TileIndex*>(memory + tiles);
        write_tiles(segments, list);
        return {list,
                num_tiles,
                reinterpret_cast<int64_t*>(memory),
                reinterpret_cast<int32_t*>(memory + progress),
                reinterpret_cast<int64_t*>(memory + num_ended),
                memory + scratch,
                scratch_bytes,
                int(threads(limit))};
    }
};

constexpr int64_t kNoLimit = INT64_MAX;

Layout layout_of(const ForwardParams& params, const Level& level) {
    return {params.sizes, params.segments, level.forward_scratch(params.sizes)};
}
Layout layout_of(const BackwardParams& params, const Level& level) {
    return {params.sizes, params.segments, level.backward_scratch(params.sizes)};
}

}  // namespace

std::vector<const Level*> supported_levels() {
    std::vector<const Level*> levels;
#if defined(SB_CPU_X86_LEVELS)
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (has_avx512) levels.push_back(&kAvx512);
    if (has_avx2) levels.push_back(&kAvx2);
#endif
    levels.push_back(&kBaseline);
    return levels;
}

const char* name_of(const Level& level) {
    return level.name;
}

const Level& level_in_use() {
    static const Level& chosen = choose_level();
    return chosen;
}

int64_t forward_workspace(const ForwardParams& params, const Level& level) {
    return layout_of(params, level).bytes(kNoLimit);
}
int64_t backward_workspace(const BackwardParams& params, int64_t limit, const Level& level) {
    return layout_of(params, level).bytes(limit);
}
void block_forward(const ForwardParams& params, const Level& level) {
    level.forward(params, layout_of(params, level).work(params.workspace, params.segments, kNoLimit));
}
void block_backward(const BackwardParams& params, const Level& level) {
    level.backward(params, layout_of(params, level).work(params.workspace, params.segments, params.workspace_bytes));
}

}  // namespace megatron_sb::cpu
