// wgmma, the matrix product of a warpgroup. B comes from shared memory, A from shared memory or registers; the result
// is in fp32 registers.
//
// Descriptors describe tiles of 128-byte rows with the 128-byte swizzle. An atom of the swizzle has 8 rows, so the
// stride between atoms (SBO, stride byte offset) is 1024 bytes. A K-major operand needs no LBO (leading byte offset).
// For an MN-major operand such as V, LBO is the distance to the next 64 columns.
//
// Bias columns (hopper.h) are rows of 16 bytes without a swizzle, so a matrix of 8 rows takes 128 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/ptx.cuh"

namespace megatron_sb::hopper {

// Joins the lower half of a descriptor and the upper half, which is the same for all tiles: SBO 1024 bytes, 128-byte
// swizzle.
__device__ __forceinline__ uint64_t descriptor(uint32_t low) {
    return (uint64_t(0x40000040u) << 32) | low;
}
__device__ __forceinline__ uint32_t descriptor_low(uint32_t shared_address, int lbo_bytes) {
    return (shared_address >> 4) | (uint32_t(lbo_bytes >> 4) << 16);
}

// The same for bias columns: SBO 128 bytes, no swizzle. As a K-major operand of 16 columns, the bias columns need
// eight more: the zeros at address `zeros`, after them. An MN-major operand has 16 rows; `zeros` is then the next
// matrix.
constexpr int kBiasMatrixBytes = 128;
__device__ __forceinline__ uint64_t bias_descriptor(uint32_t shared_address, uint32_t zeros) {
    return (uint64_t(kBiasMatrixBytes >> 4) << 32) | descriptor_low(shared_address, zeros - shared_address);
}
__device__ __forceinline__ uint64_t bias_rows_descriptor(uint32_t shared_address) {
    return bias_descriptor(shared_address, shared_address + kBiasMatrixBytes);
}

// Orders earlier accesses to registers before the wgmma that follow. Ordinary writes to shared memory also need
// fence_async_proxy().
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kInFlight>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}
// Keeps the compiler from moving uses of the accumulator d across this point. The compiler does not know that
// wgmma_wait completes the writes to d.
template <int N>
__device__ __forceinline__ void fence_accumulator(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// Sets the accumulator d to zero before the products that add to it.
template <int N>
__device__ __forceinline__ void clear_accumulator(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) d[i] = 0.f;
    fence_accumulator(d);
}

// Returns the register of an accumulator of scores in which a thread has key k of its row r (0 or 1). Key 0 is the
// oldest of this thread. The order of the keys in the K tile must be permuted (README.md).
__device__ __forceinline__ constexpr int accumulator_register(int r, int k) {
    return 4 * (k / 2) + 2 * r + k % 2;
}

// Returns the sum of the 16 numbers that each thread of a quad has in x, in fp32: x is the first operand of two
// products of 16 x 16 by 8, whose second operand is ones. Its first row has half of the numbers of a quad, and its row
// 8 the other half.
template <class Element>
__device__ __forceinline__ float sum_over_quad(Element, const uint32_t (&x)[8]) {
    constexpr bool kIsHalf = std::is_same_v<Element, __half>;
    constexpr uint32_t kOnes = kIsHalf ? 0x3c003c00 : 0x3f803f80;
    float d[4] = {};
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const uint32_t a[4] = {x[i], x[i + 1], x[i + 2], x[i + 3]};
        kIsHalf ? common::mma_fp16(d, a, kOnes, kOnes) : common::mma_bf16(d, a, kOnes, kOnes);
    }
    return d[0] + d[2];
}

// The registers of an accumulator of n columns in an asm statement. SB_REST_n(f) lists f(i) for each register but the
// first: its name (SB_NAME), or an operand that the instruction writes (SB_WRITE), or reads and writes (SB_READ).
// clang-format off
#define SB_NAME(i) ", %" #i
#define SB_WRITE(i) , "=f"(d[i])
#define SB_READ(i) , "+f"(d[i])
#define SB_REST_8(f) f(1) f(2) f(3)
#define SB_REST_64(f) SB_REST_8(f) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11) f(12) f(13) f(14) f(15) f(16) f(17) \
    f(18) f(19) f(20) f(21) f(22) f(23) f(24) f(25) f(26) f(27) f(28) f(29) f(30) f(31)
#define SB_REST_96(f) SB_REST_64(f) f(32) f(33) f(34) f(35) f(36) f(37) f(38) f(39) f(40) f(41) f(42) f(43) f(44) \
    f(45) f(46) f(47)
#define SB_REST_128(f) SB_REST_96(f) f(48) f(49) f(50) f(51) f(52) f(53) f(54) f(55) f(56) f(57) f(58) f(59) f(60) \
    f(61) f(62) f(63)
#define SB_REST_192(f) SB_REST_128(f) f(64) f(65) f(66) f(67) f(68) f(69) f(70) f(71) f(72) f(73) f(74) f(75) f(76) \
    f(77) f(78) f(79) f(80) f(81) f(82) f(83) f(84) f(85) f(86) f(87) f(88) f(89) f(90) f(91) f(92) f(93) f(94) \
    f(95)
#define SB_REST_256(f) SB_REST_192(f) f(96) f(97) f(98) f(99) f(100) f(101) f(102) f(103) f(104) f(105) f(106) \
    f(107) f(108) f(109) f(110) f(111) f(112) f(113) f(114) f(115) f(116) f(117) f(118) f(119) f(120) f(121) f(122) \
    f(123) f(124) f(125) f(126) f(127)
// clang-format on

// d (64, n) = a b (wgmma_overwrite) or d += a b (wgmma_accumulate), with a and b in shared memory. A transposed operand
// is MN-major. The predicate of the instruction selects whether it reads d. The registers of d are the first operands
// of the asm statement. a_, b_, ta_ and tb_ are the numbers of the operands that follow: a, b and the two
// transpositions.
#define SB_SHARED_PRODUCT(name, Type, type, n, first, rest, predicate, a_, b_, ta_, tb_)                            \
    template <int kTransposeA = 0, int kTransposeB = 0>                                                             \
    __device__ __forceinline__ void name(Type, float(&d)[n / 2], uint64_t a, uint64_t b) {                          \
        asm volatile("{\n.reg .pred p;\nsetp." predicate ".b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #n      \
                     "k16.f32." type " {%0" SB_REST_##n(SB_NAME) "}, " a_ ", " b_ ", p, 1, 1, " ta_ ", " tb_ ";\n}" \
                     : first(d[0]) SB_REST_##n(rest)                                                                \
                     : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));                                         \
    }
#define SB_SHARED_PRODUCTS(Type, type, n, a_, b_, ta_, tb_)                                   \
    SB_SHARED_PRODUCT(wgmma_overwrite, Type, type, n, "=f", SB_WRITE, "ne", a_, b_, ta_, tb_) \
    SB_SHARED_PRODUCT(wgmma_accumulate, Type, type, n, "+f", SB_READ, "eq", a_, b_, ta_, tb_)

// d (64, n) += a b, with a in registers and b MN-major in shared memory.
#define SB_REGISTER_PRODUCT(Type, type, n, a0_, a1_, a2_, a3_, b_)                                                  \
    __device__ __forceinline__ void wgmma_accumulate(Type, float(&d)[n / 2], const uint32_t* a, uint64_t b) {       \
        asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type \
                     " {%0" SB_REST_##n(SB_NAME) "}, {" a0_ ", " a1_ ", " a2_ ", " a3_ "}, " b_ ", p, 1, 1, 1;\n}"  \
                     : "+f"(d[0])SB_REST_##n(SB_READ)                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                         \
    }
#define SB_WGMMA_OF(Type, type)                                             \
    SB_SHARED_PRODUCTS(Type, type, 8, "%4", "%5", "%6", "%7")               \
    SB_SHARED_PRODUCTS(Type, type, 64, "%32", "%33", "%34", "%35")          \
    SB_SHARED_PRODUCTS(Type, type, 96, "%48", "%49", "%50", "%51")          \
    SB_SHARED_PRODUCTS(Type, type, 128, "%64", "%65", "%66", "%67")         \
    SB_SHARED_PRODUCTS(Type, type, 192, "%96", "%97", "%98", "%99")         \
    SB_REGISTER_PRODUCT(Type, type, 64, "%32", "%33", "%34", "%35", "%36")  \
    SB_REGISTER_PRODUCT(Type, type, 96, "%48", "%49", "%50", "%51", "%52")  \
    SB_REGISTER_PRODUCT(Type, type, 128, "%64", "%65", "%66", "%67", "%68") \
    SB_REGISTER_PRODUCT(Type, type, 256, "%128", "%129", "%130", "%131", "%132")
SB_WGMMA_OF(__nv_bfloat16, "bf16.bf16")
SB_WGMMA_OF(__half, "f16.f16")
#undef SB_WGMMA_OF
#undef SB_REGISTER_PRODUCT
#undef SB_SHARED_PRODUCTS
#undef SB_SHARED_PRODUCT
#undef SB_NAME
#undef SB_WRITE
#undef SB_READ
#undef SB_REST_8
#undef SB_REST_64
#undef SB_REST_96
#undef SB_REST_128
#undef SB_REST_192
#undef SB_REST_256

}  // namespace megatron_sb::hopper
