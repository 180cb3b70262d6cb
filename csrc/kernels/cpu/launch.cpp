// Chooses the instruction set, and lays out the workspace: the rows of q of each task, then the scratch of each thread.
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

// Returns the rows of q of a task. With more of them, each key tile that is loaded serves more queries. With fewer,
// there are more tasks for the threads. The number must not depend on the threads, heads or other segments, because the
// sums of the backward have the order of the tasks.
int32_t rows_of_task(const Segment& segment) {
    constexpr int32_t kFewestTasks = 4;
    return kRestartTile * std::clamp(segment.q_len / (kRestartTile * kFewestTasks), 1, kMostQueryTiles);
}

int64_t count_ranges(const Segments& segments) {
    int64_t ranges = 0;
    for (int s = 0; s < segments.size; ++s) {
        const int64_t rows = rows_of_task(segments[s]);
        ranges += (segments[s].q_len + rows - 1) / rows;
    }
    return ranges;
}

void write_ranges(const Segments& segments, RowRange* ranges) {
    RowRange* end = ranges;
    for (int s = 0; s < segments.size; ++s) {
        const int32_t q_len = segments[s].q_len, rows = rows_of_task(segments[s]);
        for (int64_t first = 0; first < q_len; first += rows)
            *end++ = {s, int32_t(first), int32_t(std::min<int64_t>(rows, q_len - first))};
    }
    const auto keys = [&](const RowRange& range) {
        const Segment& s = segments[range.segment];
        return std::min<int64_t>(s.k_len, int64_t(range.first) + range.count + s.q_pos_minus_k_pos);
    };
    std::stable_sort(ranges, end, [&](const RowRange& a, const RowRange& b) { return keys(a) > keys(b); });
}

// Where the parts of a workspace are, in bytes from its beginning.
struct Layout {
    int64_t num_ranges, tasks, kv_heads;
    int64_t num_ended, progress, ranges, scratch;
    int64_t scratch_bytes;  // of one thread

    Layout(const Sizes& sizes, const Segments& segments, int64_t bytes_of_a_thread)
        : num_ranges(count_ranges(segments)),
          tasks(num_ranges * sizes.batch * sizes.num_heads),
          kv_heads(int64_t(sizes.batch) * sizes.num_kv_heads),
          num_ended(kLine),  // after the ticket
          progress(round_up(num_ended + kv_heads * int64_t(sizeof(int64_t)))),
          ranges(round_up(progress + tasks * int64_t(sizeof(int32_t)))),
          scratch(round_up(ranges + num_ranges * int64_t(sizeof(RowRange)))),
          scratch_bytes(bytes_of_a_thread) {}

    // The number of threads: as many as have a task and room in `bytes`, and at least one.
    int64_t threads(int64_t bytes) const {
        const int64_t room = (bytes - scratch) / scratch_bytes;
        return std::max<int64_t>(1, std::min({int64_t(most_threads()), tasks, room}));
    }
    int64_t bytes(int64_t limit) const { return scratch + threads(limit) * scratch_bytes; }

    Work work(void* workspace, const Segments& segments, int64_t limit) const {
        char* const memory = static_cast<char*>(workspace);
        std::memset(memory, 0, size_t(ranges));
        RowRange* const list = reinterpret_cast<RowRange*>(memory + ranges);
        write_ranges(segments, list);
        return {list,
                num_ranges,
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
