// PTX instructions of sm_90, one function each: barriers, copies into shared memory, register budgets.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/ptx.cuh"

namespace megatron_sb::hopper {

using common::allow_next_kernel, common::wait_for_previous_kernel;
using common::copy_async, common::pack, common::shared_address, common::store_four;
using common::exp2_approximate, common::min_nan, common::reciprocal;

// ---- barriers: arrivals on an mbarrier release, waits acquire, both at the scope of the CTA -------------------------

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Named barriers, one for the 128 threads of each consumer warpgroup. __syncthreads uses number 0.
enum class NamedBarrier : int { kConsumer0 = 1, kConsumer1, kConsumer2 };

__device__ __forceinline__ NamedBarrier barrier_of_consumer(int warpgroup) {
    return NamedBarrier(int(NamedBarrier::kConsumer0) + warpgroup);
}
__device__ __forceinline__ void warpgroup_barrier(NamedBarrier barrier) {
    asm volatile("barrier.cta.sync.aligned %0, 128;" ::"r"(int(barrier)) : "memory");
}
// Makes all mbarriers that this thread has initialised visible to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_if(bool condition, uint64_t* barrier) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%1];\n}" ::"r"(int(condition)),
        "r"(shared_address(barrier))
        : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier, int parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done;
}
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* barrier, int parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done;
}

// ---- copies into shared memory --------------------------------------------------------------------------------------

__device__ __forceinline__ void tma_load_3d(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1,
                                            int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
__device__ __forceinline__ void tma_load_5d(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2,
                                            int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}
// Waits for all cp.async copies of this thread.
__device__ __forceinline__ void cp_async_wait_all() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}
// Orders this thread's ordinary accesses to shared memory before later accesses through wgmma or TMA. To cover those of
// another thread, fence first and then synchronise with it.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Fills shared memory with zeros, for wgmma. All threads of the CTA call it together, before a __syncthreads().
template <int kBytes>
__device__ __forceinline__ void clear_shared(uint8_t (&to)[kBytes]) {
    for (int i = threadIdx.x; i < kBytes / int(sizeof(uint4)); i += blockDim.x)
        reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
    fence_async_proxy();
}

// Stores four 8 x 8 matrices of 16-bit values. Lanes 8i to 8i + 7 pass the addresses of the rows of matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t to, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}
// The same, but stores the transposed matrices.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t to, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
__device__ __forceinline__ void store_shared_if(bool condition, uint32_t to, float x, float y) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.shared.v2.f32 [%1], {%2, %3};\n}" ::"r"(int(condition)),
        "r"(to), "f"(x), "f"(y)
        : "memory");
}
__device__ __forceinline__ void store_shared_if(bool condition, uint32_t to, float x) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.shared.f32 [%1], %2;\n}" ::"r"(int(condition)),
                 "r"(to), "f"(x)
                 : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
__device__ __forceinline__ uint4 load_shared(uint32_t from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

// A 16-byte store. The compiler would split an assignment in C++ into four stores.
__device__ __forceinline__ void store_global_if(bool condition, void* to, const uint4& x) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(int(condition)),
        "l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
        : "memory");
}

// Stores to global memory. If a pointer can come from two tensors, the compiler would use generic stores, keep fewer
// values of the kernel in uniform registers, and spill.
__device__ __forceinline__ void store_global(float* to, float x) {
    asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
__device__ __forceinline__ void store_global(float* to, float x, float y) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

// ---- between thread blocks ------------------------------------------------------------------------------------------

__device__ __forceinline__ void fence_acq_rel_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
__device__ __forceinline__ int32_t load_acquire(const int32_t* from) {
    int32_t x;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ int32_t load_relaxed(const int32_t* from) {
    int32_t x;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ void store_relaxed(int32_t* to, int32_t x) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
// Access 16 bytes in one transaction.
__device__ __forceinline__ uint4 load_relaxed_b128(const void* from) {
    uint4 x;
    asm volatile(
        "{\n.reg .b128 v;\n.reg .b64 lo, hi;\nld.relaxed.gpu.global.b128 v, [%4];\nmov.b128 {lo, hi}, v;\n"
        "mov.b64 {%0, %1}, lo;\nmov.b64 {%2, %3}, hi;\n}"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(from)
        : "memory");
    return x;
}
__device__ __forceinline__ void store_relaxed_b128(void* to, const uint4& x) {
    asm volatile(
        "{\n.reg .b128 v;\n.reg .b64 lo, hi;\nmov.b64 lo, {%1, %2};\nmov.b64 hi, {%3, %4};\nmov.b128 v, {lo, hi};\n"
        "st.relaxed.gpu.global.b128 [%0], v;\n}" ::"l"(to),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
        : "memory");
}
// Add to values in global memory, without returning them. Other CTAs see the additions in order only after a fence.
__device__ __forceinline__ void reduce_add_global(float* to, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
__device__ __forceinline__ void reduce_add_global(float* to, float x, float y) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void reduce_add_global(float* to, float x, float y, float z, float w) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w)
                 : "memory");
}

// Copy shared memory to global memory, or add floats of it there, asynchronously. Both addresses and the number of
// bytes must be multiples of 16. The thread that starts a copy or an addition must also wait for it. Fence the shared
// memory before (fence_async_proxy).
__device__ __forceinline__ void start_bulk_store(float* to, uint32_t from, int bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
        "cp.async.bulk.commit_group;" ::"l"(to),
        "r"(from), "r"(bytes)
        : "memory");
}
__device__ __forceinline__ void start_bulk_add(float* to, uint32_t from, int bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
        "cp.async.bulk.commit_group;" ::"l"(to),
        "r"(from), "r"(bytes)
        : "memory");
}
// Waits until all but the last kInFlight bulk operations of this thread are done: shared memory is read, and global
// memory is written.
template <int kInFlight>
__device__ __forceinline__ void wait_for_bulk() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kInFlight) : "memory");
}
// Waits until all but the last kInFlight bulk operations of this thread have read shared memory.
template <int kInFlight>
__device__ __forceinline__ void wait_for_bulk_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kInFlight) : "memory");
}

// ---- registers ------------------------------------------------------------------------------------------------------

// Gives this warpgroup kRegisters registers per thread, fewer or more than the kAtLaunch that it has at launch.
template <int kRegisters, int kAtLaunch>
__device__ __forceinline__ void set_registers() {
    if constexpr (kRegisters < kAtLaunch)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
    else
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace megatron_sb::hopper
