// Waits of kernels have a limit. A wait that expires is a defect: a barrier never completes, and without the limit the
// kernel would hang. The kernel records which wait expired and ends its launch with an error. The record is in host
// memory, because the CUDA context is lost then.
#pragma once

#include <cstdint>
#include <string>

namespace megatron_sb::common {

// What a thread waits for. The names are those of the barriers, which kernels/hopper/README.md lists.
enum class Wait : uint8_t {
    kNone,
    // hopper forward and backward
    kGates,  // full or empty
    // hopper forward
    kQFull,
    kQEmpty,
    kKFull,
    kKEmpty,
    kVFull,
    kVEmpty,
    kTailFull,
    kTailEmpty,
    kFinished,
    // hopper backward
    kQdoFull,
    kQdoEmpty,
    kKvFull,
    kKvEmpty,
    kCarryInFull,
    kCarryOutFull,
    kCarryOutEmpty,
    kDzFull,
    kDzEmpty,
    kOwnHalfFull,
    kOwnHalfEmpty,
    kStepInfoFull,
    kStepInfoEmpty,
    kDqTurn,
    kDqAdded,
    kDqPublished,
    kDqStagedFull,
    kDqStagedEmpty,
    kDqAddedByOlderTile,  // of another CTA, in global memory
    // tests/cpp
    kTest,
    kTestOfOtherWarp,
};
inline constexpr int kNumWaits = int(Wait::kTestOfOtherWarp) + 1;

// The first expired wait of a device; 0 if none has expired. Bits from the lowest: 32 for the waits of the CTA, one for
// each Wait, and 32 for the CTA. One word, so that the host never sees a part of it.
using ExpiredWait = unsigned long long;

inline constexpr int kCtaShift = 32;
static_assert(kNumWaits <= kCtaShift, "every Wait must have a bit");

// What the host and the kernels of a device share.
struct WaitRecord {
    ExpiredWait expired;
    uint32_t limit;  // of a wait, in units of 2^32 ns
};

// Returns the limit of a wait, in seconds: 60, or MEGATRON_SB_WAIT_LIMIT_SECONDS, which is read once. A debugger,
// racecheck of compute-sanitizer or other processes on the GPU can make waits longer. Throws InvalidArgument for a
// value that is not from 1 to 86400.
uint32_t wait_limit_seconds();

// Returns the record of the current device, as the device sees it. The first call of a device allocates it; it is never
// freed. Also works while a CUDA graph is captured. Throws RuntimeFailure if the allocation fails, and InvalidArgument
// as wait_limit_seconds() does.
WaitRecord* wait_record();

// Returns one sentence for each device on which a wait has expired, or an empty text. If nobody calls this after a wait
// has expired, the process prints the text to stderr when it exits.
std::string describe_expired_waits();

}  // namespace megatron_sb::common
