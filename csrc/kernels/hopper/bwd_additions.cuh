// The order of additions to dq. The key tiles of a row add to its dq one after another, the oldest first, so the sum is
// the same in every run. Warp 2 of warpgroup 0 waits for the turn of each step.
//
// head_dim 128: the consumers add from their registers, when TurnThread tells them that the step may add.
//     barrier         arrives                                    waits
//     dq_turn         TurnThread                                 consumers, before they add to dq
//     dq_added        each warp, after it has added              Publisher
//     dq_published    Publisher                                  TurnThread, before it reuses the turn
// A turn is one of kDqTurns slots for a step that adds to dq.
//
// head_dim 64 and wide: the sum warpgroups write dQ of a step to shared memory, panel by panel, and continue. BulkAdder
// adds the panels to dq, with bulk reductions of TMA, when the step may add. Panels use the slots of shared memory in
// turn, in the order of their columns.
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

// The additions to dq of a step.
struct Addition {
    int32_t dq_index, tile;
    bool is_first;  // of the additions to dq of these rows

    __device__ __forceinline__ static Addition of(const Step& step) {
        return {step.dq_index, step.tile, (step.flags & kOldestKeyTile) != 0};
    }
};

// Stores which key tile may add to dq of a step next, once the additions of this one are done. After the newest one,
// write_dq (bwd_finish.cu) reads this number.
__device__ __forceinline__ void pass_on_turn(const BackwardPlan& plan, const Addition& addition) {
    fence_acq_rel_gpu();
    store_relaxed(plan.dq_next_tile + addition.dq_index, addition.tile + 1);
}

// Waits of warp 2. All run in one thread.
template <class T>
class DqThread {
  public:
    __device__ DqThread(typename T::Shared& shared, const BackwardArguments& arguments)
        : shared_(shared), control_(shared.control), args_(arguments) {}

  protected:
    template <class Event, class Place>
    __device__ void watch(Event& event, const Place& item) const {
        watch_until<Event::kWait>(control_, args_.wait_record, [&] { return event.try_wait(item); });
    }
    // Waits until the next older key tile has added to dq of the step.
    __device__ void wait_for_turn(const Addition& addition) const {
        watch_until<Wait::kDqAddedByOlderTile>(control_, args_.wait_record, [&] {
            return addition.is_first || load_acquire(args_.plan.dq_next_tile + addition.dq_index) == addition.tile;
        });
    }

    typename T::Shared& shared_;
    BackwardControl<T>& control_;
    const BackwardArguments& args_;
};

// Lets the consumers add a step to dq after the next older key tile has added. Waits on dq_published, on which
// Publisher arrives, before it reuses a turn. Arrives on dq_turn, on which the consumers wait.
template <class T>
class TurnThread : DqThread<T> {
    using Base = DqThread<T>;
    using Base::control_;

  public:
    using Base::Base;

    __device__ void run() const {
        uint32_t number = 0;
        for (;; ++number) {
            const StepPlace place = StepPlace::of(number);
            this->watch(control_.steps.full, place);
            const Step& step = control_.step_info[place.slot];
            if (step.flags & kEndOfWork) break;
            const auto turn = TurnPlace<T>::of(number);
            this->watch(control_.dq_published, turn.previous_use());
            this->wait_for_turn(Addition::of(step));
            control_.dq_turn.arrive(turn);
            control_.steps.empty.arrive(place);
        }
        for (uint32_t last = number; last < number + T::kDqTurns; ++last)
            this->watch(control_.dq_published, TurnPlace<T>::of(last).previous_use());
    }
};

// Adds dQ of each step to dq, in its turn. This thread would limit the kernel if it waited for one thing after another:
// the addition takes 1,000 cycles, the fence before the turn is passed on 800, and a look at the turn of the next step
// 500. So the addition of the next step runs during the fence, and the next turn is looked at just before it. The
// additions of a step are published as soon as the thread would have to wait for something else.
template <class T>
class BulkAdder : DqThread<T> {
    using Base = DqThread<T>;
    using Base::args_, Base::control_, Base::shared_;
    using Slot = Place<T::kDqSlots>;

  public:
    using Base::Base;

    __device__ void run() {
        for (uint32_t number = 0;; ++number) {
            const StepPlace place = StepPlace::of(number);
            if (!knows_next_) {
                if (!control_.steps.full.has_happened(place)) finish_step();
                this->watch(control_.steps.full, place);
                read_next(place);
            }
            if (next_flags_ & kEndOfWork) break;
            add_step(number);
        }
        finish_step();
    }

  private:
    __device__ static Slot slot_of(uint32_t number, int panel) { return Slot::of(number * T::kPanels + panel); }

    // Reads the description of the next step. Arrives on steps.empty.
    __device__ void read_next(const StepPlace& place) {
        const Step& step = control_.step_info[place.slot];
        next_ = Addition::of(step);
        next_flags_ = step.flags;
        control_.steps.empty.arrive(place);
        knows_next_ = true;
        next_has_turn_ = next_.is_first || next_flags_ & kEndOfWork;
    }

    // Starts the additions of the next step, and finishes those of the step before. Arrives on dq_staged.empty for all
    // panels but the last.
    __device__ void add_step(uint32_t number) {
        const Slot first = slot_of(number, 0);
        if (!control_.dq_staged.full.has_happened(first)) finish_step();
        this->watch(control_.dq_staged.full, first);
        if (!next_has_turn_) {
            finish_step();
            this->wait_for_turn(next_);
        }
        const Addition addition = next_;
        start_addition(addition, 0, first);
        const StepPlace following = StepPlace::of(number + 1);
        knows_next_ = false;
        if (control_.steps.full.has_happened(following)) read_next(following);
        finish_step<1>();
#pragma unroll 1
        for (int panel = 1; panel < T::kPanels; ++panel) {
            const Slot slot = slot_of(number, panel);
            this->watch(control_.dq_staged.full, slot);
            start_addition(addition, panel, slot);
            wait_for_bulk_reads<1>();
            control_.dq_staged.empty.arrive(slot_of(number, panel - 1));
        }
        unfinished_ = addition;
        unfinished_number_ = number;
        has_unfinished_ = true;
    }
    // The oldest key tile stores dQ, the others add it. The sum warpgroup has fenced its stores to shared memory.
    __device__ void start_addition(const Addition& addition, int panel, const Slot& slot) const {
        float* const to = args_.plan.dq + (int64_t(addition.dq_index) * T::kPanels + panel) * T::kDqFloats;
        const uint32_t from = shared_address(shared_.dq[slot.slot]);
        constexpr int kBytes = T::kDqFloats * sizeof(float);
        addition.is_first ? start_bulk_store(to, from, kBytes) : start_bulk_add(to, from, kBytes);
    }
    // Waits for the additions of the unfinished step, if there is one, and publishes it. The last kLater additions that
    // have begun are of the step after it. Arrives on dq_staged.empty for the last panel.
    //
    // The fence of pass_on_turn() orders the additions before the turn (release). It also orders what this thread does
    // for the next step after the additions of the older key tile, if the load has seen that the turn has come
    // (acquire).
    template <int kLater = 0>
    __device__ void finish_step() {
        if (!has_unfinished_) return;
        wait_for_bulk<kLater>();
        control_.dq_staged.empty.arrive(slot_of(unfinished_number_, T::kPanels - 1));
        const bool looks = knows_next_ && !next_has_turn_;
        const int turn = looks ? load_relaxed(args_.plan.dq_next_tile + next_.dq_index) : 0;
        pass_on_turn(args_.plan, unfinished_);
        if (looks) next_has_turn_ = turn == next_.tile;
        has_unfinished_ = false;
    }

    Addition next_ = {};  // the step that is added next
    int next_flags_ = 0;
    bool knows_next_ = false;     // whether next_ and next_flags_ are read
    bool next_has_turn_ = false;  // whether the older key tile is known to have added to the same rows
    Addition unfinished_ = {};    // the step whose additions are in flight
    uint32_t unfinished_number_ = 0;
    bool has_unfinished_ = false;
};

}  // namespace megatron_sb::hopper
