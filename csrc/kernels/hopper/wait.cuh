// Waits with a limit in time. A wait that takes longer is a defect; it is recorded (common/expired_wait.h) and ends the
// launch with an error instead of hanging. Named barriers and __syncthreads have no limit. Their threads come from
// waits that have one, so none of them hangs alone.
//
// One thread of each CTA, the watchdog, has the clock. It acts if one of its own waits lasts until the limit; then the
// CTA has made no progress. All other threads only leave a note at each try of a wait that is not over at once: they
// store 0 at a fixed distance from the barrier. The notes tell the watchdog which waits to name. A store of 0 needs no
// register. Any code in a wait that needs one is too much: it costs up to 6% although it seldom runs.
#pragma once

#include "kernels/common/expired_wait.h"
#include "kernels/hopper/ptx.cuh"

namespace megatron_sb::hopper {

using common::ExpiredWait, common::Wait, common::WaitRecord;

// The clock of waits is the upper half of the time of the GPU in ns, so that it fits one register. A unit is 2^32 ns,
// or 4.3 s.
__device__ __forceinline__ uint32_t wait_clock() {
    uint32_t now;
    asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(now));
    return now;
}

// The watchdog looks at the clock after this many tries, and again after as many more. 2^16 tries take 20 ms to some
// seconds.
constexpr uint32_t kTriesPerCheck = 1 << 16;
// Distance in bytes from a barrier to its note.
constexpr int kNoteDistance = 2048;

// The note of a barrier, and the name of the wait on it. A thread that waits stores 0 in `unused`.
struct WaitNote {
    uint32_t unused, wait;
};

// The barriers of a kernel and their notes. All barriers belong to events (ring.cuh), and all events are members of
// Barriers. Barriers::visit(f) calls f(event) for each of them.
template <class Barriers>
struct NotedBarriers : Barriers {
    static constexpr int kCount = sizeof(Barriers) / sizeof(uint64_t);
    static_assert(sizeof(WaitNote) == sizeof(uint64_t) && sizeof(Barriers) < kNoteDistance,
                  "each barrier has a note, and the notes must come after all barriers");
    uint8_t padding[kNoteDistance - sizeof(Barriers)];
    WaitNote notes[kCount];
    uint32_t wait_began;  // by the clock of waits; for the watchdog

    // Initialises the barriers and their notes, and makes both visible to TMA. Call this in one thread, and synchronise
    // the CTA before the barriers are used.
    __device__ void init() {
        const uint64_t* const first = reinterpret_cast<const uint64_t*>(this);
        this->visit([&](auto& event) {
            event.init();
#pragma unroll 1
            for (uint64_t& barrier : event.barriers) notes[&barrier - first] = {1, uint32_t(event.kWait)};
        });
        fence_mbarrier_init();
        fence_async_proxy();
    }
};

// Leaves a note at a barrier, which must be a member of NotedBarriers.
__device__ __forceinline__ void leave_note(uint64_t* barrier) {
    asm volatile("st.relaxed.cta.shared::cta.u32 [%0], 0;" ::"r"(shared_address(barrier) + kNoteDistance) : "memory");
}
// Tries until ready() returns true. Leaves notes at `barrier`.
template <class Ready>
__device__ __forceinline__ void wait_until(uint64_t* barrier, const Ready& ready) {
    if (ready()) return;
    while (!ready()) leave_note(barrier);
}
// Waits until the phase with this parity is complete. The barrier must be a member of NotedBarriers.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
    wait_until(barrier, [&] { return mbarrier_try_wait(barrier, parity); });
}

// ---- the watchdog ---------------------------------------------------------------------------------------------------

// Writes the record, unless it has been written before, and ends the launch by a store to address 0. Do not use `trap`:
// with it ptxas ignores the register counts of setmaxnreg. The fence makes the record visible to the host before the
// store ends the launch.
__device__ __forceinline__ void abort_launch(WaitRecord* record, uint32_t waits) {
    const ExpiredWait expired = ExpiredWait(blockIdx.x) << common::kCtaShift | waits;
    asm volatile(
        "{\n.reg .b64 before;\n.reg .b64 none;\nmov.b64 none, 0;\n"
        "atom.relaxed.gpu.global.cas.b64 before, [%0], none, %1;\nfence.sc.sys;\nst.global.u32 [none], %2;\nexit;\n}" ::
            "l"(&record->expired),
        "l"(expired), "r"(0)
        : "memory");
}

// Ends the launch if this wait of the watchdog lasts longer than the limit. Lane 0 calls it from time to time while it
// waits; `first` is true at the first call. `waits` has the bit of the wait. The time is in shared memory, because a
// register would be in use even if no wait is long.
//
// Between a half and three quarters of the limit the notes are cleared, so that later ones belong to waits that still
// last. Before, they are left alone: in a launch without a defect, only the threads that wait use them. racecheck of
// compute-sanitizer can make waits last for minutes, so sanitizer_cases.py sets a longer limit.
template <class Barriers>
__device__ void check_limit(NotedBarriers<Barriers>& barriers, WaitRecord* record, uint32_t waits, bool first) {
    if (first) barriers.wait_began = wait_clock();
    const uint32_t age = wait_clock() - barriers.wait_began;
    const uint32_t limit = *const_cast<const volatile uint32_t*>(&record->limit);
    const bool clears = age >= limit / 2 && age <= limit * 3 / 4, reads = age > limit;
    if (!clears && !reads) return;
#pragma unroll 1
    for (WaitNote& note : barriers.notes) {
        if (clears) note.unused = 1;
        if (*static_cast<const volatile uint32_t*>(&note.unused) == 0) waits |= 1u << note.wait;
    }
    if (reads) abort_launch(record, waits);
}
// A wait of the watchdog: one thread, or all threads of one warp. kWait names it.
template <Wait kWait, class Barriers, class Ready>
__device__ __forceinline__ void watch_until(NotedBarriers<Barriers>& barriers, WaitRecord* record, const Ready& ready) {
    if (ready()) return;
    for (uint32_t tries = 1; !ready(); ++tries)
        if (tries % kTriesPerCheck == 0 && threadIdx.x % 32 == 0)
            check_limit(barriers, record, 1u << int(kWait), tries == kTriesPerCheck);
}

}  // namespace megatron_sb::hopper
