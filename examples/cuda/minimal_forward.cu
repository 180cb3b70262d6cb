// The forward of stick-breaking attention in its simplest form: one thread for each row of Q, no shared memory.
//
// Read this file before csrc/kernels/portable, which computes the same with tiles and tensor cores. The letters are
// those of the paper (arXiv 2410.17980, eq. 1). Row j of Q processes its keys from the newest to the oldest. P is the
// mass, the part of the stick that is left. It starts at 1:
//
//     z = scale q_j . k_i                  the logit of key i
//     beta = sigmoid(z) = e / (1 + e)      with e = exp(z): the share of P that key i takes
//     A = beta P                           the weight of key i
//     o_j += A v_i
//     P <- (1 - beta) P                    the mass left for older keys
//
// Unlike softmax, this needs neither a running maximum nor a division at the end, because the weights and the remaining
// mass sum to 1.
//
// Two things make a long context cheap. First, the row stops when P is below mass_threshold: all older keys together
// change o_j by at most mass_threshold max|v|. Second, the row writes a restart record for the backward, which then
// starts at the oldest visited key. The record is that key and the mass on its newer side.
//
// All tensors are contiguous fp32: q (batch, queries, heads, d), k (batch, keys, kv_heads, d), v (batch, keys,
// kv_heads, d_v), o (batch, queries, heads, d_v); mass and the restart record are (batch, heads, queries). The queries
// are the last positions of the keys.
#include <cuda_runtime.h>

constexpr int kMaxHeadDim = 128;        // of v: each thread keeps o_j in an array
constexpr float kMaxLogit = 80.f;       // exp(80) is finite in fp32
constexpr float kLeastMass = 0x1p-64f;  // below it, the backward could not restart accurately in fp32

struct Sizes {
    int batch, queries, keys, heads, kv_heads, d, d_v;
};

static __device__ float dot(const float* x, const float* y, int n) {
    float sum = 0.f;
    for (int c = 0; c < n; ++c) sum += x[c] * y[c];
    return sum;
}

__global__ void forward(Sizes s, const float* q, const float* k, const float* v, float scale, float mass_threshold,
                        int attend_current, float* o, float* mass, int* restart_key, float* restart_mass) {
    // Which row of Q this thread owns.
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= s.queries) return;
    const int head = blockIdx.y % s.heads, batch = blockIdx.y / s.heads;
    const int kv_head = head / (s.heads / s.kv_heads);
    const float* const q_j = q + ((long long)(batch * s.queries + j) * s.heads + head) * s.d;

    // The causal mask: row j sees the keys [0, num_keys). Its own position is one of them only with attend_current.
    const int num_keys = s.keys - s.queries + j + attend_current;

    const float least_mass = fmaxf(mass_threshold, kLeastMass);
    float o_j[kMaxHeadDim] = {};
    float P = 1.f, P_before = 1.f;
    int oldest = num_keys;
    for (int i = num_keys - 1; i >= 0 && P >= least_mass; --i) {
        const long long key = (long long)(batch * s.keys + i) * s.kv_heads + kv_head;
        const float e = expf(fminf(scale * dot(q_j, k + key * s.d, s.d), kMaxLogit));
        const float one_minus_beta = 1.f / (1.f + e);  // 1 - beta would lose its digits to cancellation
        const float A = e * one_minus_beta * P;
        for (int c = 0; c < s.d_v; ++c) o_j[c] += A * v[key * s.d_v + c];
        oldest = i;
        P_before = P;
        P *= one_minus_beta;
    }

    for (int c = 0; c < s.d_v; ++c) o[((long long)(batch * s.queries + j) * s.heads + head) * s.d_v + c] = o_j[c];
    const long long row = (long long)(batch * s.heads + head) * s.queries + j;
    mass[row] = P;
    restart_key[row] = oldest;  // num_keys: the row sees no key
    restart_mass[row] = P_before;
}

// Returns a cudaError_t; 0 is success. All pointers are device pointers.
extern "C" int minimal_forward(Sizes s, const float* q, const float* k, const float* v, float scale,
                               float mass_threshold, int attend_current, float* o, float* mass, int* restart_key,
                               float* restart_mass, cudaStream_t stream) {
    if (s.d_v > kMaxHeadDim) return cudaErrorInvalidValue;
    const int threads = 128;
    const dim3 blocks((s.queries + threads - 1) / threads, s.batch * s.heads);
    forward<<<blocks, threads, 0, stream>>>(s, q, k, v, scale, mass_threshold, attend_current, o, mass, restart_key,
                                            restart_mass);
    return cudaGetLastError();
}
