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

// Limit of a wait, in seconds. A kernel under compute-sanitizer, or on a GPU that other processes share, waits for
// less.
inline constexpr uint32_t kWaitLimitSeconds = 60;

// The first expired wait of a device; 0 if none has expired. Bits from the lowest: 32 for the waits of the CTA, one for
// each Wait, and 32 for the CTA. One word, so that the host never sees a part of a record.
using ExpiredWait = unsigned long long;

inline constexpr int kCtaShift = 32;
static_assert(kNumWaits <= kCtaShift, "every Wait must have a bit");

// Returns the record of the current device, as the device sees it. The first call of a device allocates it; it is never
// freed. Also works while a CUDA graph is captured. Throws RuntimeFailure if the allocation fails.
ExpiredWait* expired_wait_record();

// Returns one sentence for each device on which a wait has expired, or an empty text. If nobody calls this after a wait
// has expired, the process prints the text to stderr when it exits.
std::string describe_expired_waits();

}  // namespace megatron_sb::common
