// Warps 1 and 3 of warpgroup 0 of the backward. They exchange carries with the CTAs that own the neighbouring key
// tiles.
//
//     warp 1  CarryReader      reads the carries of a step, from the next older key tile or from the restart records
//     warp 3  Publisher        sends carries to the next newer key tile
//
// Synchronisation within the CTA.
//     barrier                 arrives                            waits
//     steps.full              step loader                        these warps
//     steps.empty             these warps                        step loader
//     carry_in_full           CarryReader                        consumers that scan
//     qdo.empty               every consumer thread              CarryReader, before it writes carry_in; step loader
//     carry_out_full[1]       each warp of the newer half        Publisher
//     newer_carry_out_empty   Publisher                          newer half
// Each thread that reads or writes step_info, carry_in or carry_out arrives itself.
//
// Synchronisation between CTAs. Publisher writes a carry slot, and CarryReader of the next newer key tile reads it, in
// one transaction; the field `tile` says for which key tile the carry is valid. Publisher also sends the order of
// additions to dq at head_dim 128 (bwd_additions.cuh).
//
// No deadlock. Tickets hand out the older tiles of a key range first. So a CTA waits only for a CTA that already runs
// and has a lower ticket, and the lowest unfinished ticket waits for no other CTA. This holds only if a CTA publishes
// everything about a finished key tile before it waits for anything that its next key tile needs.
#pragma once

#include "kernels/hopper/bwd_additions.cuh"

namespace megatron_sb::hopper {

// Reads the carries of each step into carry_in: from the next older key tile, or from the restart records if this is
// the oldest one. Waits on steps.full and qdo.empty; arrives on carry_in_full and steps.empty with all lanes.
template <class T>
class CarryReader {
  public:
    __device__ CarryReader(BackwardControl<T>& control, const BackwardArguments& arguments)
        : control_(control), args_(arguments), lane_(threadIdx.x % 32) {}

    __device__ void run() const {
        Stage<T> stage;
        for (uint32_t number = 0;; ++number, stage = stage.next()) {
            const StepPlace place = StepPlace::of(number);
            control_.steps.wait_full(place);
            const Step& step = control_.step_info[place.slot];
            if (step.flags & kEndOfWork) return;
            control_.qdo.wait_empty(stage);
            Carry carries[2];  // of rows lane_ and lane_ + 32; all loads for them are in flight together
            read_starts(step, carries);
            if (step.flags & kOldestKeyTile)
                read_first(step, carries);
            else
                wait_for_carries(step, stage.slot, carries);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (carries[i].mass < kLeastCarriedMass) carries[i].mass = kLeastCarriedMass;  // keeps NaN
                control_.carry_in[stage.slot][lane_ + 32 * i] = carries[i];
            }
            control_.carry_in_full.arrive(stage);
            control_.steps.empty.arrive(place);
        }
    }

  private:
    __device__ int64_t index(const Step& step, int i) const {
        return step.row_index + lane_ + 32 * i;
    }
    __device__ bool has_row(const Step& step, int i) const {
        return lane_ + 32 * i < step.num_rows;
    }

    // Reads where the rows of a step start. Rows after the end of the step never start.
    __device__ void read_starts(const Step& step, Carry (&carries)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) carries[i] = {0.f, 0.f, has_row(step, i) ? -1 : kNeverStarts, 0.f};
        if (!(step.flags & kSlow)) return;  // all rows have started in older tiles
        int edges[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // loads without branches, for both rows at once
            const int64_t at = step.row_index + max(min(lane_ + 32 * i, step.num_rows - 1), 0);
            edges[i] = restart_edge<float>(args_.params, at);
            carries[i].restart_mass = restart_mass<float>(args_.params, at);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int visible = min(step.visible + lane_ + 32 * i, step.num_keys) + step.tile * T::kKeyTile;
            const int start = start_half(edges[i], carries[i].restart_mass, max(visible, 0)) - T::kHalves * step.tile;
            if (has_row(step, i)) carries[i].start = start;
        }
    }
    // Reads the carries at the oldest key tile of the chain. The mass is used only for rows that start before all keys.
    // Other rows get their mass where they start.
    __device__ void read_first(const Step& step, Carry (&carries)[2]) const {
        const float* const prefix_in = static_cast<const float*>(args_.params.prefix_in);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!has_row(step, i)) continue;
            carries[i].mass = restart_mass<float>(args_.params, index(step, i));
            if (prefix_in != nullptr) carries[i].prefix = prefix_in[index(step, i)];
        }
    }
    // Polls the carry slots until Publisher of the next older key tile has written all of them for this tile.
    __device__ void wait_for_carries(const Step& step, int slot, Carry (&carries)[2]) const {
        uint4 slots[2];
        const auto ready = [&] {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                slots[i] = make_uint4(0, 0, step.tile, 0);
                if (has_row(step, i)) slots[i] = load_relaxed_b128(args_.plan.carries + index(step, i));
            }
            return int(slots[0].z) == step.tile && int(slots[1].z) == step.tile;
        };
        wait_until(&control_.carry_in_full.barriers[slot], ready);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            carries[i].mass = __uint_as_float(slots[i].x);
            carries[i].prefix = __uint_as_float(slots[i].y);
        }
    }

    BackwardControl<T>& control_;
    const BackwardArguments& args_;
    const int lane_;
};

// Publishes the carries of each step to the next newer key tile, and at head_dim 128 also its additions to dq.
template <class T>
class Publisher {
  public:
    __device__ Publisher(BackwardControl<T>& control, const BackwardArguments& arguments)
        : control_(control), args_(arguments), lane_(threadIdx.x % 32) {}

    __device__ void run() {
        for (uint32_t number = 0;; ++number) {
            const StepPlace place = StepPlace::of(number);
            control_.steps.wait_full(place);
            const Step& step = control_.step_info[place.slot];
            const int flags = step.flags;
            if (flags & kEndOfWork) return;
            // Before the consumers hand over the carries of step n, they have added step n - 2, or add it without
            // waiting: each warp adds it before it scans step n.
            constexpr uint32_t kLag = 2;
            if constexpr (!T::kAddsDqInBulk) publish_additions_before(max(number + 1, kLag) - kLag);
            publish_carries(number);
            if (flags & kPartialSums && flags & kLastStepOfTile) mark_sums(step);
            if constexpr (T::kAddsDqInBulk)
                control_.steps.empty.arrive(place);
            else if (flags & kLastStepOfTile)
                publish_additions_before(number + 1);
        }
    }

  private:
    // Publishes that the consumers have added the steps before `end` to dq. Waits on dq_added, on which the consumers
    // arrive. Arrives on dq_published, on which TurnThread waits, and on steps.empty. The additions of a finished key
    // tile must be published before the warp waits for the carries of its next key tile. Otherwise two CTAs could wait
    // for each other.
    __device__ void publish_additions_before(uint32_t end) {
        for (; next_addition_ < end; ++next_addition_) {
            if (lane_ == 0) {
                const auto turn = TurnPlace<T>::of(next_addition_);
                control_.dq_added.wait(turn);
                pass_on_turn(args_.plan, Addition::of(control_.step_info[next_addition_ % kStepRing]));
                control_.dq_published.arrive(turn);
            }
            __syncwarp();
            control_.steps.empty.arrive(StepPlace::of(next_addition_));
        }
    }
    // Tells add_parts() that this part of the key tile has sums. It runs after this kernel.
    __device__ void mark_sums(const Step& step) const {
        const Sizes& sizes = args_.params.sizes;
        const int kv_head = step.batch * sizes.num_kv_heads + step.kv_head;
        if (lane_ == 0) args_.plan.has_sums[args_.plan.partial_row(sizes, step.part, kv_head, step.k_row)] = 1;
    }
    // Waits on carry_out_full of the newer half, which arrives. Arrives on newer_carry_out_empty, on which it waits.
    __device__ void publish_carries(uint32_t number) const {
        const Step& step = control_.step_info[number % kStepRing];
        const int64_t first = step.row_index;  // reads the description before the wait
        const int flags = step.flags, num_rows = step.num_rows, tile = step.tile;
        const auto place = CarryPlace<T>::of(number);
        constexpr int kNewer = T::kHalves - 1;
        for (auto& full : control_.carry_out_full[kNewer]) full.wait(place);
        const float2 carries[2] = {control_.carry_out[kNewer][place.slot][lane_],
                                   control_.carry_out[kNewer][place.slot][lane_ + 32]};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = lane_ + 32 * i;
            if (row >= num_rows) continue;
            if (flags & kNewestKeyTile)
                static_cast<float*>(args_.params.prefix_out)[first + row] = carries[i].y;
            else
                store_relaxed_b128(
                    args_.plan.carries + first + row,
                    make_uint4(__float_as_uint(carries[i].x), __float_as_uint(carries[i].y), tile + 1, 0));
        }
        control_.newer_carry_out_empty.arrive(place);
    }

    BackwardControl<T>& control_;
    const BackwardArguments& args_;
    const int lane_;
    uint32_t next_addition_ = 0;  // first step whose additions are not published yet
};

}  // namespace megatron_sb::hopper
