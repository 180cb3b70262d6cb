// The other three producer warps of the backward. They exchange carries and the order of additions to dq with the CTAs
// that own the neighbouring key tiles.
//
//     CarryReader      brings the carries of a step, from the next older key tile or from the restart records
//     wait_for_turns   lets the consumers add a step to dq after the next older key tile has added
//     Publisher        sends carries to the next newer key tile, and later the count of tiles that have added
//
// Synchronisation within the CTA.
//     step_info_full / step_info_empty  step descriptions: step loader -> these three warps
//     qdo_empty, carry_in_full          carry_in: released by the consumers with Q and dO; CarryReader -> consumers
//     carry_out_full / carry_out_empty  [0]: older half -> newer half; [1]: newer half -> Publisher
//     dq_turn                           wait_for_turns -> consumers, which then add
//     dq_added                          consumers -> Publisher
//     dq_published                      Publisher -> wait_for_turns, which then reuses the turn
// Each thread that reads or writes the data arrives itself.
//
// Synchronisation between CTAs. A carry slot is written and read in one transaction; its field `tile` names the key
// tile that it is for. `plan.dq_added` is stored after the additions (additions -> mbarrier -> fence -> store). The
// next key tile loads it with acquire before its own additions (load -> mbarrier -> additions).
//
// No deadlock. Tickets hand out the older tiles of a key range first. So a CTA waits only for a CTA that already runs
// and has a lower ticket; the lowest unfinished ticket waits for nobody. This requires that a CTA publishes everything
// about a finished key tile before it waits for anything that its next key tile needs.
#pragma once

#include "kernels/hopper/bwd_common.cuh"

namespace megatron_sb::hopper {

// Brings the carries of each step: from the next older key tile, or from the restart records for the oldest one.
class CarryReader {
  public:
    __device__ CarryReader(BackwardControl& control, const BackwardArguments& arguments)
        : control_(control), args_(arguments), lane_(threadIdx.x % 32) {}

    __device__ void run() const {
        StageCursor cursor;
        for (int number = 0;; ++number, cursor = cursor.next()) {
            wait_for_step_info(control_, number);
            const Step& step = control_.step_info[number % kStepRing];
            if (step.flags & kEndOfWork) return;
            mbarrier_wait(&control_.qdo_empty[cursor.stage], cursor.parity ^ 1);
            Carry carries[2];  // of rows lane_ and lane_ + 32; all loads for them are in flight together
            read_starts(step, carries);
            if (step.flags & kOldestKeyTile)
                read_first(step, carries);
            else
                wait_for_carries(step, carries);
#pragma unroll
            for (int i = 0; i < 2; ++i) control_.carry_in[cursor.stage][lane_ + 32 * i] = carries[i];
            mbarrier_arrive(&control_.carry_in_full[cursor.stage]);
            mbarrier_arrive(&control_.step_info_empty[number % kStepRing]);
        }
    }

  private:
    __device__ int64_t index(const Step& step, int i) const {
        return step.row_index + lane_ + 32 * i;
    }
    __device__ bool has_row(const Step& step, int i) const {
        return lane_ + 32 * i < step.num_rows;
    }

    // Reads where the rows of a step start. Rows beyond the end of the step never start.
    __device__ void read_starts(const Step& step, Carry (&carries)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) carries[i] = {0.f, 0.f, has_row(step, i) ? -1 : kNeverStarts, 0.f};
        if (!(step.flags & kSlow)) return;  // all rows have started in older tiles
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!has_row(step, i)) continue;
            const int64_t at = index(step, i);
            const int begin = step.tile * kBackwardKeyTile;
            const int visible = min(step.visible + lane_ + 32 * i, step.num_keys) + begin;
            carries[i].restart_mass = restart_mass<float>(args_.params, at);
            carries[i].start =
                start_half(args_.params.restart.edge[at], carries[i].restart_mass, max(visible, 0)) - 2 * step.tile;
        }
    }
    // Reads the carry of rows that start before all keys. The mass of other rows is set where they start.
    __device__ void read_first(const Step& step, Carry (&carries)[2]) const {
        const float* const prefix_in = static_cast<const float*>(args_.params.prefix_in);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!has_row(step, i)) continue;
            carries[i].mass = restart_mass<float>(args_.params, index(step, i));
            if (prefix_in != nullptr) carries[i].prefix = prefix_in[index(step, i)];
        }
    }
    __device__ void wait_for_carries(const Step& step, Carry (&carries)[2]) const {
        uint4 slots[2];
        for (uint32_t tries = 0;; ++tries) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                slots[i] = make_uint4(0, 0, step.tile, 0);
                if (has_row(step, i)) slots[i] = load_relaxed_b128(args_.plan.carries + index(step, i));
            }
            if (int(slots[0].z) == step.tile && int(slots[1].z) == step.tile) break;
            if (tries == kMaxTries) abort_launch();
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            carries[i].mass = __uint_as_float(slots[i].x);
            carries[i].prefix = __uint_as_float(slots[i].y);
        }
    }

    static constexpr uint32_t kMaxTries = 1 << 24;

    BackwardControl& control_;
    const BackwardArguments& args_;
    const int lane_;
};

// Orders the additions to dq: a step may add after the next older key tile has added. Runs in one thread. It waits on
// `dq_published` before it reuses a turn, and arrives on `dq_turn`, on which the consumers wait.
__device__ inline void wait_for_turns(BackwardControl& c, const BackwardArguments& a) {
    constexpr uint32_t kMaxTries = 1 << 24;
    for (int number = 0;; ++number) {
        wait_for_step_info(c, number);
        const Step& step = c.step_info[number % kStepRing];
        if (step.flags & kEndOfWork) return;
        const int turn = number % kDqTurns;
        if (number >= kDqTurns) mbarrier_wait(&c.dq_published[turn], (number / kDqTurns - 1) & 1);
        if (!(step.flags & kOldestKeyTile)) {
            const int32_t* const dq_added = a.plan.dq_added + step.dq_index;
            for (uint32_t tries = 0; load_acquire(dq_added) != step.tile; ++tries)
                if (tries == kMaxTries) abort_launch();
        }
        mbarrier_arrive(&c.dq_turn[turn]);
        mbarrier_arrive(&c.step_info_empty[number % kStepRing]);
    }
}

// Publishes the carries of a step to the next newer key tile, and later the fact that the step has added to dq. The
// additions of a finished key tile are published before this warp waits for the carries of the next one. Otherwise two
// CTAs could wait for each other.
template <class T>
class Publisher {
  public:
    __device__ Publisher(BackwardControl& control, const BackwardArguments& arguments)
        : control_(control), args_(arguments), lane_(threadIdx.x % 32) {}

    __device__ void run() {
        // Before the consumers make the carries of step n, they have added step n - kLag to dq.
        constexpr int kLag = T::kDzSlots;
        for (int number = 0;; ++number) {
            wait_for_step_info(control_, number);
            const int flags = step(number).flags;
            if (flags & kEndOfWork) return;
            publish_additions_before(number - kLag + 1);
            publish_carries(number);
            if (flags & kLastStepOfTile) publish_additions_before(number + 1);
        }
    }

  private:
    __device__ const Step& step(int number) const { return control_.step_info[number % kStepRing]; }

    __device__ void publish_carries(int number) const {
        const Step& of = step(number);
        for (uint64_t& of_warp : control_.carry_out_full[1][number % kCarryOutSlots])
            mbarrier_wait(&of_warp, number / kCarryOutSlots & 1);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = lane_ + 32 * i;
            const float2 carry = control_.carry_out[1][number % kCarryOutSlots][row];
            if (row >= of.num_rows) continue;
            if (of.flags & kNewestKeyTile)
                static_cast<float*>(args_.params.prefix_out)[of.row_index + row] = carry.y;
            else
                store_relaxed_b128(args_.plan.carries + of.row_index + row,
                                   make_uint4(__float_as_uint(carry.x), __float_as_uint(carry.y), of.tile + 1, 0));
        }
        mbarrier_arrive(&control_.carry_out_empty[1][number % kCarryOutSlots]);
    }
    __device__ void publish_additions_before(int end) {
        for (; next_addition_ < end; ++next_addition_) {
            if (lane_ == 0) {
                const Step& of = step(next_addition_);
                const int turn = next_addition_ % kDqTurns;
                mbarrier_wait(&control_.dq_added[turn], next_addition_ / kDqTurns & 1);
                fence_acq_rel_gpu();
                if (!(of.flags & kNewestKeyTile)) store_relaxed(args_.plan.dq_added + of.dq_index, of.tile + 1);
                mbarrier_arrive(&control_.dq_published[turn]);
            }
            __syncwarp();
            mbarrier_arrive(&control_.step_info_empty[next_addition_ % kStepRing]);
        }
    }

    BackwardControl& control_;
    const BackwardArguments& args_;
    const int lane_;
    int next_addition_ = 0;  // first step whose additions are not published yet
};

}  // namespace megatron_sb::hopper
