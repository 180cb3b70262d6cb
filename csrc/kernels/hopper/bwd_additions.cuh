// The order of additions to dq. The key tiles of a row add to its dq one after another, the oldest first, so the sum is
// the same in every run. Warp 2 of warpgroup 0 waits for the turn of each step.
//
// head_dim 128: the consumers add from their registers, when TurnThread tells them that the step may add.
//     barrier         arrives                                    waits
//     dq_turn         TurnThread                                 consumers, before they add to dq
//     dq_added        each warp, after it has added              AdditionPublisher, in the warp of Publisher
//     dq_published    AdditionPublisher                          TurnThread, before it reuses the turn
// A turn is one of kDqTurns slots for a step that adds to dq.
//
// head_dim 64 and wide: the sum warpgroups write dQ of a step to shared memory, panel by panel, and go on. BulkAdder
// adds the panels to dq, with bulk reductions of TMA, when the turn of the step comes. Panels go round the slots of
// shared memory in the order of their columns.
//     barrier           arrives                          waits
//     dq_staged.full    each sum warp, after dQ          BulkAdder
//     dq_staged.empty   BulkAdder, after it has read dQ  sum warpgroup
//
// Between CTAs: the CTA stores the number of the next newer key tile in plan.dq_next_tile, after its additions and a
// fence. Warp 2 of the CTA that owns that tile waits for its number (load with acquire).
//
// Warp 2 is also the watchdog of the CTA (wait.cuh). It stays until all additions are published, so it outlives every
// wait of the CTA.
#pragma once

#include "kernels/hopper/bwd_common.cuh"

namespace megatron_sb::hopper {

// Stores which key tile may add to dq of a step next, once the additions of this one are done. After the newest one,
// write_dq (bwd_finish.cu) reads this number.
__device__ __forceinline__ void pass_on_turn(const BackwardPlan& plan, const Step& step) {
    fence_acq_rel_gpu();
    store_relaxed(plan.dq_next_tile + step.dq_index, step.tile + 1);
}

// Waits of warp 2. All run in one thread.
template <class T>
class DqThread {
  protected:
    __device__ DqThread(BackwardControl<T>& control, const BackwardArguments& arguments)
        : control_(control), args_(arguments) {}

    template <class Event, class Place>
    __device__ void watch(Event& event, const Place& item) const {
        watch_until<Event::kWait>(control_, args_.expired_wait, [&] { return event.try_wait(item); });
    }
    // Whether the next older key tile has added to dq of the step.
    __device__ bool has_turn(const Step& step) const {
        return step.flags & kOldestKeyTile || load_acquire(args_.plan.dq_next_tile + step.dq_index) == step.tile;
    }
    __device__ void wait_for_turn(const Step& step) const {
        watch_until<Wait::kDqAddedByOlderTile>(control_, args_.expired_wait, [&] { return has_turn(step); });
    }

    BackwardControl<T>& control_;
    const BackwardArguments& args_;
};

// Lets the consumers add a step to dq after the next older key tile has added. Waits on dq_published, on which
// AdditionPublisher arrives, before it reuses a turn. Arrives on dq_turn, on which the consumers wait.
template <class T>
class TurnThread : DqThread<T> {
    using Base = DqThread<T>;
    using Base::control_;

  public:
    __device__ TurnThread(typename T::Shared& shared, const BackwardArguments& arguments)
        : Base(shared.control, arguments) {}

    __device__ void run() const {
        uint32_t number = 0;
        for (;; ++number) {
            const StepPlace place = StepPlace::of(number);
            this->watch(control_.steps.full, place);
            const Step& step = control_.step_info[place.slot];
            if (step.flags & kEndOfWork) break;
            const auto turn = TurnPlace<T>::of(number);
            this->watch(control_.dq_published, turn.previous_use());
            this->wait_for_turn(step);
            control_.dq_turn.arrive(turn);
            control_.steps.empty.arrive(place);
        }
        for (uint32_t last = number; last < number + T::kDqTurns; ++last)
            this->watch(control_.dq_published, TurnPlace<T>::of(last).previous_use());
    }
};

// Publishes that the consumers have added steps to dq. All lanes of the warp of Publisher call it. The additions of a
// finished key tile must be published before the warp waits for the carries of its next key tile. Otherwise two CTAs
// could wait for each other.
template <class T>
class AdditionPublisher {
  public:
    __device__ AdditionPublisher(BackwardControl<T>& control, const BackwardArguments& arguments)
        : control_(control), args_(arguments), lane_(threadIdx.x % 32) {}

    // Publishes the steps that the consumers have added, or will add without waiting, before they hand over the carries
    // of step `number`: each warp adds step n - 2 before it scans step n.
    __device__ void publish_ready(uint32_t number) {
        constexpr uint32_t kLag = 2;
        publish_before(max(number + 1, kLag) - kLag);
    }
    // Publishes the steps before `end`. Waits on dq_added, on which the consumers arrive. Arrives on dq_published, on
    // which TurnThread waits, and on steps.empty.
    __device__ void publish_before(uint32_t end) {
        for (; next_ < end; ++next_) {
            if (lane_ == 0) {
                const auto turn = TurnPlace<T>::of(next_);
                control_.dq_added.wait(turn);
                pass_on_turn(args_.plan, control_.step_info[next_ % kStepRing]);
                control_.dq_published.arrive(turn);
            }
            __syncwarp();
            control_.steps.empty.arrive(StepPlace::of(next_));
        }
    }

  private:
    BackwardControl<T>& control_;
    const BackwardArguments& args_;
    const int lane_;
    uint32_t next_ = 0;  // first step whose additions are not published yet
};

// Adds dQ of each step to dq, in its turn. Several bulk operations run at a time. The additions of a step are published
// when they are complete: after the first addition of the next step has begun, or earlier if the thread would have to
// wait for anything that takes longer.
template <class T>
class BulkAdder : DqThread<T> {
    using Base = DqThread<T>;
    using Base::args_, Base::control_;
    using Slot = Place<T::kDqSlots>;

  public:
    __device__ BulkAdder(typename T::Shared& shared, const BackwardArguments& arguments)
        : Base(shared.control, arguments), shared_(shared) {}

    __device__ void run() {
        for (uint32_t number = 0;; ++number) {
            const StepPlace place = StepPlace::of(number);
            if (!control_.steps.full.try_wait(place)) {
                finish_step();
                this->watch(control_.steps.full, place);
            }
            const Step& step = control_.step_info[place.slot];
            if (step.flags & kEndOfWork) break;
            if (!this->has_turn(step)) {
                finish_step();
                this->wait_for_turn(step);
            }
            add_step(step, number);
        }
        finish_step();
    }

  private:
    __device__ static Slot slot_of(uint32_t number, int panel) { return Slot::of(number * T::kPanels + panel); }

    // Starts the additions of a step, and finishes those of the step before. Arrives on dq_staged.empty for all panels
    // but the last.
    __device__ void add_step(const Step& step, uint32_t number) {
#pragma unroll 1
        for (int panel = 0; panel < T::kPanels; ++panel) {
            const Slot slot = slot_of(number, panel);
            if (panel == 0 && !control_.dq_staged.full.has_happened(slot)) finish_step();
            this->watch(control_.dq_staged.full, slot);
            start_addition(step, panel, slot);
            if (panel == 0) {
                finish_step<1>();
            } else {
                wait_for_bulk_reads<1>();
                control_.dq_staged.empty.arrive(slot_of(number, panel - 1));
            }
        }
        unfinished_ = number;
        has_unfinished_ = true;
    }
    // The oldest key tile stores dQ, the others add it. The sum warpgroup has fenced its stores to shared memory.
    __device__ void start_addition(const Step& step, int panel, const Slot& slot) const {
        float* const to = args_.plan.dq + (int64_t(step.dq_index) * T::kPanels + panel) * T::kDqFloats;
        const uint32_t from = shared_address(shared_.dq[slot.slot]);
        constexpr int kBytes = T::kDqFloats * sizeof(float);
        step.flags& kOldestKeyTile ? start_bulk_store(to, from, kBytes) : start_bulk_add(to, from, kBytes);
    }
    // Waits for the additions of the unfinished step, if there is one, and publishes it. The last kLater additions that
    // have begun are of the next step. Arrives on dq_staged.empty for the last panel, and on steps.empty.
    template <int kLater = 0>
    __device__ void finish_step() {
        if (!has_unfinished_) return;
        wait_for_bulk<kLater>();
        control_.dq_staged.empty.arrive(slot_of(unfinished_, T::kPanels - 1));
        const StepPlace place = StepPlace::of(unfinished_);
        pass_on_turn(args_.plan, control_.step_info[place.slot]);
        control_.steps.empty.arrive(place);
        has_unfinished_ = false;
    }

    typename T::Shared& shared_;
    uint32_t unfinished_ = 0;  // step whose additions are in flight
    bool has_unfinished_ = false;
};

}  // namespace megatron_sb::hopper
