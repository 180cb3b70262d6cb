// Vector types of GCC and Clang, as wide as the registers of the instruction set that this file is compiled for, and
// 2^x on these vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512F__)
#define SB_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define SB_VECTOR_BYTES 32
#else
#define SB_VECTOR_BYTES 16
#endif

namespace megatron_sb::cpu::SB_CPU_LEVEL {

template <class T>
inline constexpr int kLanes = SB_VECTOR_BYTES / int(sizeof(T));

template <class T>
struct VectorOf {
    using Int = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
    typedef T Value __attribute__((vector_size(SB_VECTOR_BYTES)));
    // The result of a comparison: in each lane all bits are 1 or all are 0.
    typedef Int Mask __attribute__((vector_size(SB_VECTOR_BYTES)));
};
template <class T>
using Vec = typename VectorOf<T>::Value;
template <class T>
using Mask = typename VectorOf<T>::Mask;

template <class T>
inline Vec<T> load(const T* from) {
    Vec<T> value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}
template <class T>
inline void store(T* to, const Vec<T>& value) {
    std::memcpy(to, &value, sizeof(value));
}
// x - 0 is x, so this is a broadcast. x + 0 is not: it would be computed, because -0 + 0 is 0.
template <class T>
inline Vec<T> splat(T value) {
    return value - Vec<T>{};
}
template <class T>
inline bool any(const Mask<T>& mask) {
    bool found = false;
    for (int lane = 0; lane < kLanes<T>; ++lane) found |= mask[lane] != 0;
    return found;
}

inline constexpr double kLog2E = 1.44269504088896340736;

// Constants that depend on the type of sums. The largest e keeps 1 + e and its reciprocal normal numbers.
template <class T>
struct Numbers;
template <>
struct Numbers<float> {
    static constexpr float kMaxLog2E = 126.0f;   // e = 2^min(z log2 e, this)
    static constexpr float kMaxQuadE = 0x1p24f;  // up to this e, the product of four (1 + e) is about 2^96 at most
    static constexpr float kRestartFloor = 0x1p-64f;
    static constexpr float kRound = 0x1.8p23f;  // x + kRound has x, rounded to an integer, in its low bits
    static constexpr int kMantissaBits = 23, kBias = 127, kDegree = 7;
};
template <>
struct Numbers<double> {
    static constexpr double kMaxLog2E = 1022.0;
    static constexpr double kMaxQuadE = 0x1p200;
    static constexpr double kRestartFloor = 0x1p-500;
    static constexpr double kRound = 0x1.8p52;
    static constexpr int kMantissaBits = 52, kBias = 1023, kDegree = 13;
};

// The Taylor series of 2^f on [-1/2, 1/2], with coefficients ln(2)^n / n!. The truncation error is below half an ulp of
// T.
template <class T>
struct Exp2Coefficients {
    T value[Numbers<T>::kDegree + 1];
    constexpr Exp2Coefficients() : value() {
        double term = 1;
        for (int n = 0; n <= Numbers<T>::kDegree; ++n) {
            value[n] = T(term);
            term *= 0.693147180559945309417232121458 / (n + 1);
        }
    }
};

// Returns 2^min(x, kMaxLog2E). Returns 0 below the normal range, including -inf, and NaN for NaN.
template <class T>
inline Vec<T> exp2_clamped(Vec<T> x) {
    using N = Numbers<T>;
    static constexpr Exp2Coefficients<T> c;
    const Mask<T> underflow = x < splat<T>(1 - N::kBias);
    x = x > splat<T>(N::kMaxLog2E) ? splat<T>(N::kMaxLog2E) : x;
    const Vec<T> shifted = x + N::kRound;
    const Vec<T> f = x - (shifted - N::kRound);
    Vec<T> series = splat<T>(c.value[N::kDegree]);
    for (int n = N::kDegree - 1; n >= 0; --n) series = series * f + c.value[n];
    Mask<T> exponent;
    std::memcpy(&exponent, &shifted, sizeof(exponent));
    exponent = (exponent + N::kBias) << N::kMantissaBits;  // shifts out the bits of kRound
    Vec<T> power;
    std::memcpy(&power, &exponent, sizeof(power));
    return underflow ? Vec<T>{} : series * power;
}

}  // namespace megatron_sb::cpu::SB_CPU_LEVEL
