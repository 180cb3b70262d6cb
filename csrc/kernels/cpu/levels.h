// The interface between launch.cpp, which every CPU can run, and fwd.cpp and bwd.cpp, which are compiled once for each
// instruction set (a level).
//
// If two objects of different levels defined the same inline function, the linker would keep either one, and an older
// CPU could meet instructions that it does not have. Therefore everything that fwd.cpp and bwd.cpp define is in the
// namespace of their level. They use no container of the standard library, and allocate no memory: launch.cpp does both
// for them. The tests cpu_level_* check the symbols of the objects.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace megatron_sb::cpu {

// The most query tiles of a task. A query tile has up to kRestartTile rows of Q.
inline constexpr int kMostQueryTiles = 4;

// The rows of Q of a task: `count` rows of a segment, from its row `first` on.
struct RowRange {
    int32_t segment, first, count;
};

// The work of a call, in its workspace. Task i is done by the thread that gets i from ++*ticket, so threads take tasks
// in increasing order.
struct Work {
    const RowRange* ranges;  // those with more keys first
    int64_t num_ranges;
    int64_t* ticket;     // initially 0
    int32_t* progress;   // of the backward: (KV heads of all batch elements, tasks that read them), initially 0
    int64_t* num_ended;  // of the backward: (KV heads of all batch elements,), initially 0
    char* scratch;       // thread i owns the bytes from i * scratch_bytes on
    int64_t scratch_bytes;
    int threads;
};

struct Level {
    const char* name;
    void (*forward)(const ForwardParams&, const Work&);
    void (*backward)(const BackwardParams&, const Work&);
    // Bytes of scratch for one thread: multiples of 64.
    int64_t (*forward_scratch)(const Sizes&);
    int64_t (*backward_scratch)(const Sizes&);
};

#define SB_DECLARE_LEVEL(level)                        \
    namespace level {                                  \
    void forward(const ForwardParams&, const Work&);   \
    void backward(const BackwardParams&, const Work&); \
    int64_t forward_scratch(const Sizes&);             \
    int64_t backward_scratch(const Sizes&);            \
    }
SB_DECLARE_LEVEL(baseline)
SB_DECLARE_LEVEL(avx2)
SB_DECLARE_LEVEL(avx512)
#undef SB_DECLARE_LEVEL

}  // namespace megatron_sb::cpu
