// wgmma, the matrix product of a warpgroup. B comes from shared memory, A from shared memory or registers; the result
// is in fp32 registers.
//
// Descriptors describe tiles of 128-byte rows with the 128-byte swizzle. An atom of the swizzle has 8 rows, so the
// stride between atoms (SBO, stride byte offset) is 1024 bytes. A K-major operand needs no LBO (leading byte offset).
// For an MN-major operand such as V, LBO is the distance to the next 64 columns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace megatron_sb::hopper {

// Joins the lower half of a descriptor and the upper half, which is the same for all tiles: SBO 1024 bytes, 128-byte
// swizzle.
__device__ __forceinline__ uint64_t descriptor(uint32_t low) {
    return (uint64_t(0x40000040u) << 32) | low;
}
__device__ __forceinline__ uint32_t descriptor_low(uint32_t shared_address, int lbo_bytes) {
    return (shared_address >> 4) | (uint32_t(lbo_bytes >> 4) << 16);
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

// Returns the register of an accumulator of scores in which a thread has key k of its row r (0 or 1). Key 0 is the
// oldest of this thread. The order of the keys in the K tile must be permuted (README.md).
__device__ __forceinline__ constexpr int accumulator_register(int r, int k) {
    return 4 * (k / 2) + 2 * r + k % 2;
}

// clang-format off
#define SB_OUT_16 \
    "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), \
    "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15])
#define SB_ADD_16 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define SB_OUT_32 \
    "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), \
    "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), \
    "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), \
    "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
#define SB_ADD_32 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define SB_OUT_48 \
    "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), \
    "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), \
    "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), \
    "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31]), \
    "=f"(d[32]), "=f"(d[33]), "=f"(d[34]), "=f"(d[35]), "=f"(d[36]), "=f"(d[37]), "=f"(d[38]), "=f"(d[39]), \
    "=f"(d[40]), "=f"(d[41]), "=f"(d[42]), "=f"(d[43]), "=f"(d[44]), "=f"(d[45]), "=f"(d[46]), "=f"(d[47])
#define SB_ADD_48 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define SB_OUT_64 \
    "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), \
    "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), \
    "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), \
    "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31]), \
    "=f"(d[32]), "=f"(d[33]), "=f"(d[34]), "=f"(d[35]), "=f"(d[36]), "=f"(d[37]), "=f"(d[38]), "=f"(d[39]), \
    "=f"(d[40]), "=f"(d[41]), "=f"(d[42]), "=f"(d[43]), "=f"(d[44]), "=f"(d[45]), "=f"(d[46]), "=f"(d[47]), \
    "=f"(d[48]), "=f"(d[49]), "=f"(d[50]), "=f"(d[51]), "=f"(d[52]), "=f"(d[53]), "=f"(d[54]), "=f"(d[55]), \
    "=f"(d[56]), "=f"(d[57]), "=f"(d[58]), "=f"(d[59]), "=f"(d[60]), "=f"(d[61]), "=f"(d[62]), "=f"(d[63])
#define SB_ADD_64 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define SB_REGISTERS_16 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define SB_REGISTERS_32 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define SB_REGISTERS_48 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}"
#define SB_REGISTERS_64 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
// clang-format on

// d (64, n) = a b (wgmma_overwrite) or d += a b (wgmma_accumulate), with a and b in shared memory. A transposed operand
// is MN-major. The predicate of the instruction selects whether it reads d. The registers of d are the first operands
// of the asm statement. a_, b_, ta_ and tb_ are the numbers of the operands that follow: a, b and the two
// transpositions.
#define SB_SHARED_PRODUCT(name, Type, type, n, count, outputs, predicate, a_, b_, ta_, tb_)                     \
    template <int kTransposeA = 0, int kTransposeB = 0>                                                         \
    __device__ __forceinline__ void name(Type, float(&d)[count], uint64_t a, uint64_t b) {                      \
        asm volatile("{\n.reg .pred p;\nsetp." predicate ".b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" n   \
                     "k16.f32." type " " SB_REGISTERS_##count ", " a_ ", " b_ ", p, 1, 1, " ta_ ", " tb_ ";\n}" \
                     : outputs                                                                                  \
                     : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));                                     \
    }
#define SB_SHARED_PRODUCTS(Type, type, n, count, a_, b_, ta_, tb_)                                   \
    SB_SHARED_PRODUCT(wgmma_overwrite, Type, type, n, count, SB_OUT_##count, "ne", a_, b_, ta_, tb_) \
    SB_SHARED_PRODUCT(wgmma_accumulate, Type, type, n, count, SB_ADD_##count, "eq", a_, b_, ta_, tb_)

// d (64, n) += a b, with a in registers and b MN-major in shared memory.
#define SB_REGISTER_PRODUCT(Type, type, n, count, a0_, a1_, a2_, a3_, b_)                                          \
    __device__ __forceinline__ void wgmma_accumulate(Type, float(&d)[count], const uint32_t* a, uint64_t b) {      \
        asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type \
                     " " SB_REGISTERS_##count ", {" a0_ ", " a1_ ", " a2_ ", " a3_ "}, " b_ ", p, 1, 1, 1;\n}"     \
                     : SB_ADD_##count                                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
    }
#define SB_WGMMA_OF(Type, type)                                                  \
    SB_SHARED_PRODUCTS(Type, type, "32", 16, "%16", "%17", "%18", "%19")         \
    SB_SHARED_PRODUCTS(Type, type, "64", 32, "%32", "%33", "%34", "%35")         \
    SB_SHARED_PRODUCTS(Type, type, "96", 48, "%48", "%49", "%50", "%51")         \
    SB_SHARED_PRODUCTS(Type, type, "128", 64, "%64", "%65", "%66", "%67")        \
    SB_REGISTER_PRODUCT(Type, type, "64", 32, "%32", "%33", "%34", "%35", "%36") \
    SB_REGISTER_PRODUCT(Type, type, "96", 48, "%48", "%49", "%50", "%51", "%52") \
    SB_REGISTER_PRODUCT(Type, type, "128", 64, "%64", "%65", "%66", "%67", "%68")
SB_WGMMA_OF(__nv_bfloat16, "bf16.bf16")
SB_WGMMA_OF(__half, "f16.f16")
#undef SB_WGMMA_OF
#undef SB_REGISTER_PRODUCT
#undef SB_SHARED_PRODUCTS
#undef SB_SHARED_PRODUCT
#undef SB_OUT_16
#undef SB_OUT_32
#undef SB_OUT_48
#undef SB_OUT_64
#undef SB_ADD_16
#undef SB_ADD_32
#undef SB_ADD_48
#undef SB_ADD_64
#undef SB_REGISTERS_16
#undef SB_REGISTERS_32
#undef SB_REGISTERS_48
#undef SB_REGISTERS_64

}  // namespace megatron_sb::hopper
