// Rings: slots of shared memory through which warps hand items to each other. Item n is in slot n % kSlots. The types
// own the barriers, their phases and the number of threads that arrive, so kernels compute no parity and no count.
#pragma once

#include "kernels/hopper/wait.cuh"

namespace megatron_sb::hopper {

// Where an item of a ring is: its slot, and the phase of the slot's barriers in this use.
template <int kSlots>
struct Place {
    int slot = 0, phase = 0;

    template <class Number>
    __device__ __forceinline__ static Place of(Number item) {
        return {int(item % kSlots), int(item / kSlots & 1)};
    }
    __device__ __forceinline__ Place next() const {
        return slot + 1 == kSlots ? Place{0, phase ^ 1} : Place{slot + 1, phase};
    }
    // The item that had the slot before. Before the first item of a slot, its events count as past.
    __device__ __forceinline__ Place previous_use() const { return {slot, phase ^ 1}; }
};

// The barriers of something that happens to each item of a ring. They live in NotedBarriers (wait.cuh).
template <int kSlots>
struct SlotBarriers {
    uint64_t barriers[kSlots];

    __device__ __forceinline__ void arrive(const Place<kSlots>& item) { mbarrier_arrive(&barriers[item.slot]); }
    __device__ __forceinline__ void arrive_if(bool condition, const Place<kSlots>& item) {
        mbarrier_arrive_if(condition, &barriers[item.slot]);
    }
    // Arrives, and makes the event wait for this many bytes of TMA loads.
    __device__ __forceinline__ void arrive_with_bytes(const Place<kSlots>& item, int bytes) {
        mbarrier_arrive_expect_tx(&barriers[item.slot], bytes);
    }
    __device__ __forceinline__ void wait(const Place<kSlots>& item) { mbarrier_wait(&barriers[item.slot], item.phase); }
    // Waits for a short time only. Returns whether it has happened.
    __device__ __forceinline__ bool try_wait(const Place<kSlots>& item) {
        return mbarrier_try_wait(&barriers[item.slot], item.phase);
    }
    __device__ __forceinline__ bool has_happened(const Place<kSlots>& item) {
        return mbarrier_test_wait(&barriers[item.slot], item.phase);
    }
};

// An event of an item: it happens once kArrivals threads have arrived and their TMA loads are complete.
template <Wait kWait_, int kSlots, int kArrivals>
struct Event : SlotBarriers<kSlots> {
    static constexpr Wait kWait = kWait_;

    __device__ void init() {
#pragma unroll 1
        for (uint64_t& barrier : this->barriers) mbarrier_init(&barrier, kArrivals);
    }
};

// The writers of a slot wait until it is empty, write, and arrive on `full`: kProducers threads. The readers wait until
// it is full, read, and arrive on `empty`: kConsumers threads.
template <Wait kFull, Wait kEmpty, int kSlots, int kProducers, int kConsumers>
struct Ring {
    Event<kFull, kSlots, kProducers> full;
    Event<kEmpty, kSlots, kConsumers> empty;

    __device__ __forceinline__ void wait_full(const Place<kSlots>& item) { full.wait(item); }
    __device__ __forceinline__ void wait_empty(const Place<kSlots>& item) { empty.wait(item.previous_use()); }
    // A test some time before the wait hides the latency of the answer.
    __device__ __forceinline__ bool is_empty(const Place<kSlots>& item) {
        return empty.has_happened(item.previous_use());
    }

    template <class Visit>
    __device__ void visit(const Visit& f) {
        f(full);
        f(empty);
    }
};

}  // namespace megatron_sb::hopper
