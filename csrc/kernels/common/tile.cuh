// Tiles in shared memory, and the three matrix products on them.
//
// A tile is rows of kPitch bytes. The 16-byte piece p of row r is stored at piece p ^ (r % 8), so that ldmatrix has no
// bank conflicts, row-wise or transposed. A step of mma.sync along k is 32 bytes for every type: 16 half-precision
// values or 8 floats.
//
// Fragments of mma.sync, lane = 4 g + t: an accumulator block (16 x 8) holds rows g, g + 8 and columns 2t, 2t + 1. Key
// rows are permuted in shared memory: accumulator column 8n + 2t + c is key t (G/4) + 2n + c of a group of G keys. A
// thread then holds G/4 neighbouring keys of a row.
#pragma once

#include "core/segment.h"
#include "kernels/common/ptx.cuh"
#include "kernels/common/scalars.h"

namespace megatron_sb::common {

inline constexpr int kThreads = 128;
inline constexpr int kWarps = kThreads / 32;

// ---- element types -------------------------------------------------------------------------------------------------

template <class T>
inline constexpr int kDepth = 32 / int(sizeof(T));  // values in a step along k

template <class T>
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, BFloat16>) {
        mma_bf16(c, a, b0, b1);
    } else if constexpr (std::is_same_v<T, Half>) {
        mma_fp16(c, a, b0, b1);
    } else {
        // fp32 as a sum of two tf32 values. The tensor core truncates its sums instead of rounding them. Over many
        // steps that would drift, so each step has its own sum, which starts with the small terms. Infinity has no low
        // part and is left out of the small terms, where it would meet a 0 or an infinity of the other sign.
        uint32_t a_high[4], a_low[4], b_high[2], b_low[2], a_finite[4], b_finite[2];
        const auto split = [](uint32_t bits, uint32_t& high, uint32_t& low, uint32_t& finite) {
            const float x = __uint_as_float(bits);
            const bool infinite = isinf(x);
            high = round_to_tf32(x);
            low = infinite ? 0 : round_to_tf32(x - __uint_as_float(high));
            finite = infinite ? 0 : high;
        };
        for (int i = 0; i < 4; ++i) split(a[i], a_high[i], a_low[i], a_finite[i]);
        split(b0, b_high[0], b_low[0], b_finite[0]);
        split(b1, b_high[1], b_low[1], b_finite[1]);
        float step[4] = {};
        mma_tf32(step, a_low, b_finite[0], b_finite[1]);
        mma_tf32(step, a_finite, b_low[0], b_low[1]);
        mma_tf32(step, a_high, b_high[0], b_high[1]);
        for (int i = 0; i < 4; ++i) c[i] += step[i];
    }
}

// ---- loads of rows --------------------------------------------------------------------------------------------------

template <int kGroup>
__device__ inline int column_of_key(int key) {
    const int lane = key / (kGroup / 4), rest = key % (kGroup / 4);
    return rest / 2 * 8 + lane * 2 + rest % 2;
}
template <int kGroup>
__device__ inline int key_of_column(int column) {
    return column / 2 % 4 * (kGroup / 4) + column / 8 * 2 + column % 2;
}

// Rows of one head of a tensor, in bytes.
struct HeadRows {
    const char* data;
    int64_t stride;
    int width;

    __device__ HeadRows rows_from(int64_t row) const { return {data + row * stride, stride, width}; }
    __device__ HeadRows bytes_from(int byte) const { return {data + byte, stride, width - byte}; }
};

template <class T>
__device__ inline HeadRows head_rows(const Rows<const void*>& rows, int64_t batch, int64_t head, int width) {
    const T* data = static_cast<const T*>(rows.data) + batch * rows.batch_stride + head * rows.head_stride;
    return {reinterpret_cast<const char*>(data), rows.row_stride * int64_t(sizeof(T)), width * int(sizeof(T))};
}

struct InOrder {
    __device__ int operator()(int row) const { return row; }
};
template <int kGroup>
struct KeysToColumns {
    __device__ int operator()(int key) const { return column_of_key<kGroup>(key); }
};
struct EveryRow {
    __device__ bool operator()(int) const { return true; }
};

// Copies kRows rows to shared memory, row r to place(r). Writes zeros for rows from num_rows on, for rows that are not
// live, and beyond the width: values that do not exist must not reach a product, because 0 * NaN is NaN. `place`
// permutes the bits of a row number, so place(a + b) = place(a) + place(b) if a and b share no bit.
template <int kRows, int kPitch, class Place = InOrder, class Live = EveryRow>
__device__ inline void load_rows(uint32_t to, const HeadRows& from, int num_rows, Place place = {}, Live live = {}) {
    constexpr int kPieces = kPitch / 16, kRowsAtOnce = kThreads / kPieces;
    static_assert(kRows % kRowsAtOnce == 0, "all threads copy the same number of pieces");
    const int thread = threadIdx.x % kThreads, piece = thread % kPieces, first = thread / kPieces;
    const char* data = from.data + first * from.stride + piece * 16;
    const int rows = piece * 16 < from.width ? num_rows : 0, first_at = place(first);
    const uint32_t first_to = to + first_at * kPitch + ((piece ^ first_at % 8) << 4);
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
        const int row = first + i * kRowsAtOnce, row_step = place(i * kRowsAtOnce);
        copy_async((first_to ^ row_step % 8 << 4) + row_step * kPitch, data, row < rows && live(row));
        data += kRowsAtOnce * from.stride;
    }
}

// Returns a row of keys in blocks. `from` is block 0, and `block_stride` is in bytes.
__device__ inline const char* row_of_blocks(const HeadRows& from, const KeyBlocks& blocks, int64_t block_stride,
                                            int row) {
    const int block = clamp_row(__ldg(blocks.table + row / blocks.block_size), 0, blocks.num_blocks - 1);
    return from.data + block * block_stride + row % blocks.block_size * from.stride;
}

// Copies rows [first_row, first_row + num_rows) of keys in blocks, as load_rows does. See row_of_blocks.
template <int kRows, int kPitch, class Place>
__device__ inline void load_rows_of_blocks(uint32_t to, const HeadRows& from, const KeyBlocks& blocks,
                                           int64_t block_stride, int first_row, int num_rows, Place place) {
    constexpr int kPieces = kPitch / 16, kRowsAtOnce = kThreads / kPieces;
    static_assert(kRows % kRowsAtOnce == 0, "all threads copy the same number of pieces");
    const int thread = threadIdx.x % kThreads, piece = thread % kPieces, first = thread / kPieces;
    const int rows = piece * 16 < from.width ? num_rows : 0;
    for (int row = first; row < kRows; row += kRowsAtOnce) {
        const int at = place(row);
        const char* const data = row < rows ? row_of_blocks(from, blocks, block_stride, first_row + row) : from.data;
        copy_async(to + at * kPitch + ((piece ^ at % 8) << 4), data + piece * 16, row < rows);
    }
}

// ---- products -------------------------------------------------------------------------------------------------------
//
// The functions below return the address that a lane reads. Tiles begin at multiples of 1024 bytes, and only bits 4 to
// 6 are swizzled. All other offsets, along a row or by multiples of 8 rows, are constants that the instruction adds;
// they need no register.

__device__ inline uint32_t advance(uint32_t address, int bytes) {  // moves along the row, by a multiple of 16 bytes
    return (address ^ (bytes & 112)) + (bytes & ~127);
}

template <int kPitch>
__device__ inline uint32_t lane_rows_16(int lane) {  // rows 0..15; lanes below 16: first piece, others: second piece
    return (lane % 16) * kPitch + ((lane / 16 ^ lane % 8) << 4);
}
template <int kPitch>
__device__ inline uint32_t lane_rows_8_8(int lane) {  // both pieces; lanes below 16: rows 0..7, others: rows 8..15
    return (lane % 8 + lane / 16 * 8) * kPitch + ((lane / 8 % 2 ^ lane % 8) << 4);
}
template <int kPitch>
__device__ inline uint32_t lane_float(int lane) {  // one float: column g of row 2t; next_row() reaches row 2t + 1
    const int g = lane / 4, row = lane % 4 * 2;
    return row * kPitch + ((g / 4 ^ row) << 4) + g % 4 * 4;
}
template <int kPitch>
__device__ inline uint32_t next_row(uint32_t address, int rows) {  // moves by 0 or 1 rows; `address` is in an even row
    return (address ^ 16 * rows) + rows * kPitch;
}

// For operands with the k dimension along the rows of the tile.
template <class T, int kPitch>
__device__ inline uint32_t lane_b_along_rows(int lane) {
    return sizeof(T) == 2 ? lane_rows_16<kPitch>(lane) : lane_float<kPitch>(lane);
}
template <class T, int kPitch>
__device__ inline uint32_t lane_a_along_rows(int lane) {
    return sizeof(T) == 2 ? lane_rows_8_8<kPitch>(lane) : lane_float<kPitch>(lane);
}

// Loads two blocks of B: rows from `step` * kDepth on, columns from 16 `pair` on.
template <class T, int kPitch>
__device__ inline void load_b_along_rows(uint32_t (&b)[4], uint32_t from, int step, int pair) {
    if constexpr (sizeof(T) == 2) {
        load_matrices_transposed(b, advance(from, 32 * pair) + step * 16 * kPitch);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            b[i] = load_shared(next_row<kPitch>(advance(from, 32 * (2 * pair + i / 2)), i % 2) + step * 8 * kPitch);
    }
}

// Loads 16 rows of A. Row i of A is column 16 `block` + i of the tile.
template <class T, int kPitch>
__device__ inline void load_a_along_rows(uint32_t (&a)[4], uint32_t from, int step, int block) {
    if constexpr (sizeof(T) == 2) {
        load_matrices_transposed(a, advance(from, 32 * block) + step * 16 * kPitch);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = load_shared(next_row<kPitch>(advance(from, 32 * (2 * block + i % 2)), i / 2) + step * 8 * kPitch);
    }
}

// Converts accumulators to A: their columns become the k dimension of the next product. (fp32: k = t is column 2t, and
// k = t + 4 is column 2t + 1; lane_float reads B in the same order.)
template <class T, int kBlocks>
__device__ inline void a_from_accumulators(uint32_t (&a)[4], const float (&c)[kBlocks][4], int step) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = pack<T>(c[2 * step + i / 2][i % 2 * 2], c[2 * step + i / 2][i % 2 * 2 + 1]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = __float_as_uint(c[step][i % 2 * 2 + i / 2]);
    }
}

struct NoWork {
    __device__ void operator()(int) const {}
};

// c (16 kTiles, 8 kBlocks) += a b^T over the first `width` bytes of the rows of both tiles. It also calls
// interleaved(i) for each i below kPitch / 32, in order: independent arithmetic that fills the issue slots between the
// steps of the tensor cores.
template <class T, int kPitch, int kTiles, int kBlocks, class Interleaved = NoWork>
__device__ inline void multiply_rows(float (&c)[kTiles][kBlocks][4], uint32_t a_tile, uint32_t b_tile, int width,
                                     Interleaved interleaved = {}) {
    constexpr int kSteps = kPitch / 32, kUnrolled = kSteps < 8 && sizeof(T) == 2 ? kSteps : sizeof(T) == 2 ? 8 : 2;
    const int lane = opaque(threadIdx.x % 32);
    const uint32_t a_lane = a_tile + lane_rows_16<kPitch>(lane), b_lane = b_tile + lane_rows_8_8<kPitch>(lane);
#pragma unroll 1
    for (int first = 0; first < kSteps && (first == 0 || first * 32 < width); first += kUnrolled) {
#pragma unroll
        for (int i = 0; i < kUnrolled; ++i) {
            const int step = first + i;
            uint32_t a[kTiles][4];
#pragma unroll
            for (int m = 0; m < kTiles; ++m) load_matrices(a[m], advance(a_lane, 32 * step) + m * 16 * kPitch);
#pragma unroll
            for (int n = 0; n < kBlocks; n += 2) {
                uint32_t b[4];
                load_matrices(b, advance(b_lane, 32 * step) + n * 8 * kPitch);
#pragma unroll
                for (int m = 0; m < kTiles; ++m) {
                    multiply_add<T>(c[m][n], a[m], b[0], b[1]);
                    multiply_add<T>(c[m][n + 1], a[m], b[2], b[3]);
                }
            }
            if constexpr (kUnrolled == kSteps) interleaved(step);
        }
    }
    if constexpr (kUnrolled != kSteps) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) interleaved(step);
    }
}

// Moves block (i + kBy) % kBlocks to block i.
template <int kBy, int kTiles, int kBlocks>
__device__ inline void rotate_blocks(float (&x)[kTiles][kBlocks][4]) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float rotated[kBlocks];
#pragma unroll
            for (int n = 0; n < kBlocks; ++n) rotated[n] = x[m][(n + kBy) % kBlocks][j];
#pragma unroll
            for (int n = 0; n < kBlocks; ++n) x[m][n][j] = rotated[n];
        }
}

// c (16 kTiles, 8 kOut) += a b. `a` is in accumulators (16 kTiles, 8 kBlocks); b is the first 8 kBlocks rows of the
// tile.
//
// Registers cannot be indexed at run time, so the steps of a 16-bit type are unrolled. fp32 has twice as many steps
// with three products each. Unrolling them all makes the code larger than the instruction cache and the compiler slow.
// The loop of fp32 rotates the blocks of `a` instead, so each iteration reads the same registers. After the loop, `a`
// has its original value.
template <class T, int kPitch, int kTiles, int kBlocks, int kOut>
__device__ inline void multiply_accumulators(float (&c)[kTiles][kOut][4], float (&a)[kTiles][kBlocks][4],
                                             uint32_t b_tile) {
    constexpr int kSteps = kBlocks * 8 / kDepth<T>, kUnrolled = sizeof(T) == 2 ? kSteps : 2;
    static_assert(kSteps % kUnrolled == 0, "the loop rotates `a` once around");
    const uint32_t b_lane = b_tile + lane_b_along_rows<T, kPitch>(opaque(threadIdx.x % 32));
#pragma unroll 1
    for (int first = 0; first < kSteps; first += kUnrolled) {
#pragma unroll
        for (int i = 0; i < kUnrolled; ++i) {
            uint32_t fragment[kTiles][4];
#pragma unroll
            for (int m = 0; m < kTiles; ++m) a_from_accumulators<T>(fragment[m], a[m], i);
#pragma unroll
            for (int n = 0; n < kOut; n += 2) {
                uint32_t b[4];
                load_b_along_rows<T, kPitch>(b, b_lane, first + i, n / 2);
#pragma unroll
                for (int m = 0; m < kTiles; ++m) {
                    multiply_add<T>(c[m][n], fragment[m], b[0], b[1]);
                    multiply_add<T>(c[m][n + 1], fragment[m], b[2], b[3]);
                }
            }
        }
        if constexpr (kUnrolled < kSteps) rotate_blocks<kUnrolled>(a);
    }
}

// c (16 kTiles, 8 kOut) += a^T b over kRows rows of both tiles. It reads the first columns of `a`, and the columns of b
// from b_column on. b_column is a multiple of 8 kOut.
template <class T, int kRows, int kPitchA, int kPitchB, int kTiles, int kOut>
__device__ inline void multiply_columns(float (&c)[kTiles][kOut][4], uint32_t a_tile, uint32_t b_tile, int b_column) {
    constexpr int kSteps = kRows / kDepth<T>, kUnrolled = sizeof(T) == 2 ? kSteps : 1;  // more would spill with fp32
    const int lane = opaque(threadIdx.x % 32);
    const uint32_t a_lane = a_tile + lane_a_along_rows<T, kPitchA>(lane);
    const uint32_t b_lane = advance(b_tile + lane_b_along_rows<T, kPitchB>(lane), b_column * int(sizeof(T)));
#pragma unroll(kUnrolled)
    for (int step = 0; step < kSteps; ++step) {
        uint32_t a[kTiles][4];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) load_a_along_rows<T, kPitchA>(a[m], a_lane, step, m);
#pragma unroll
        for (int n = 0; n < kOut; n += 2) {
            uint32_t b[4];
            load_b_along_rows<T, kPitchB>(b, b_lane, step, n / 2);
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                multiply_add<T>(c[m][n], a[m], b[0], b[1]);
                multiply_add<T>(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// to[first_column ...] += factor * row r of the accumulators, for columns below `width`. Only one lane of a launch adds
// to each value. Atomics are used because a lane that read, added and wrote would wait for each value.
template <int kOut>
__device__ inline void add_row(float* to, int width, int first_column, const float (&c)[kOut][4], int r, float factor) {
#pragma unroll
    for (int n = 0; n < kOut; ++n) {
        const int column = first_column + 8 * n;
        if (column >= width) break;
        float* const at = to + column + threadIdx.x % 4 * 2;
        atomicAdd(at, factor * c[n][2 * r]);
        atomicAdd(at + 1, factor * c[n][2 * r + 1]);
    }
}

}  // namespace megatron_sb::common
