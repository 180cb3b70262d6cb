// Waits with a limit. A wait that takes longer is a defect; it is recorded (common/expired_wait.h) and ends the launch
// with an error instead of hanging. Named barriers and __syncthreads have no limit. Their threads come from waits that
// have one, so none of them hangs alone.
#pragma once

#include "kernels/common/expired_wait.h"
#include "kernels/hopper/ptx.cuh"

namespace megatron_sb::hopper {

using common::ExpiredWait, common::Wait;

// A wait, for the record. `number` counts the uses of the barrier, or is the number of the key tile that waits.
struct WaitSite {
    Wait wait;
    uint32_t number;
    ExpiredWait* record;
};

// Writes the record, unless it has been written before, and ends the launch by a store to address 0. Do not use `trap`:
// with it ptxas ignores the register counts of setmaxnreg. The fence makes the record visible to the host before the
// store ends the launch. The thread ends here, so this code needs no register that the kernel needs.
__device__ __forceinline__ void abort_launch(const WaitSite& site) {
    asm volatile(
        "{\n.reg .b32 cta, warp;\n.reg .b64 expired, none;\n"
        "mov.u32 cta, %%ctaid.x;\nmin.u32 cta, cta, %3;\nshl.b32 cta, cta, 5;\n"
        "mov.u32 warp, %%tid.x;\nshr.u32 warp, warp, 5;\nor.b32 warp, warp, cta;\nor.b32 warp, warp, %2;\n"
        "mov.b64 expired, {%1, warp};\nmov.b64 none, 0;\n"
        "atom.relaxed.gpu.global.cas.b64 expired, [%0], none, expired;\nfence.sc.sys;\n"
        "st.global.u32 [none], cta;\nexit;\n}" ::"l"(site.record),
        "r"(site.number), "r"(int(site.wait) << (common::kWaitShift - 32)), "n"(common::kMaxRecordedCta)
        : "memory");
}

// The clock of waits is the upper half of the time of the GPU in ns, so that it fits one register. A unit is 2^32 ns,
// or 4.3 s.
__device__ __forceinline__ uint32_t wait_clock() {
    uint32_t now;
    asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(now));
    return now;
}
// The limit in units of the clock, rounded up. The unit in which a wait begins does not count.
constexpr uint32_t kWaitLimit = uint32_t((uint64_t(common::kWaitLimitSeconds) * 1'000'000'000 >> 32) + 1);

// Tries until ready() returns true. It reads the clock only at every 256th try, because most waits are shorter than a
// reading. One register holds the number of tries in its lowest 8 bits, and above them the time of the first reading.
template <uint32_t kLimit = kWaitLimit, class Ready>
__device__ __forceinline__ void wait_until(const Ready& ready, const WaitSite& site) {
    if (ready()) return;
    for (uint32_t state = 0; !ready();) {
        if (++state & 255) continue;
        const uint32_t now = wait_clock() << 8;
        state = state == 256 ? now : state - 256;
        if (now - state > kLimit << 8) abort_launch(site);
    }
}

// Waits until the phase with this parity is complete.
template <uint32_t kLimit = kWaitLimit>
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity, const WaitSite& site) {
    wait_until<kLimit>([&] { return mbarrier_try_wait(barrier, parity); }, site);
}

}  // namespace megatron_sb::hopper
