#include <cstdlib>
#include <cstring>

#include "kernels/cpu/cpu.h"

namespace megatron_sb::cpu {
namespace {

struct Level {
    const char* name;
    void (*forward)(const ForwardParams&);
    void (*backward)(const BackwardParams&);
};

constexpr Level kBaseline = {"baseline", baseline::block_forward, baseline::block_backward};
#if defined(SB_CPU_X86_LEVELS)
constexpr Level kAvx2 = {"avx2", avx2::block_forward, avx2::block_backward};
constexpr Level kAvx512 = {"avx512", avx512::block_forward, avx512::block_backward};
#endif

// MEGATRON_SB_CPU_LEVEL lowers the level, so that one machine can test all levels. It cannot raise the level above what
// the machine supports. Every value except avx512 and avx2 selects baseline.
Level choose_level() {
#if defined(SB_CPU_X86_LEVELS)
    const char* wanted = std::getenv("MEGATRON_SB_CPU_LEVEL");
    const bool allow_avx512 = wanted == nullptr || std::strcmp(wanted, "avx512") == 0;
    const bool allow_avx2 = allow_avx512 || std::strcmp(wanted, "avx2") == 0;
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (has_avx512 && allow_avx512) return kAvx512;
    if (has_avx2 && allow_avx2) return kAvx2;
#endif
    return kBaseline;
}

const Level& level() {
    static const Level chosen = choose_level();
    return chosen;
}

}  // namespace

const char* instruction_set() {
    return level().name;
}
void block_forward(const ForwardParams& params) {
    level().forward(params);
}
void block_backward(const BackwardParams& params) {
    level().backward(params);
}

}  // namespace megatron_sb::cpu
