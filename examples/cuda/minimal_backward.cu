// The backward of stick-breaking attention in its simplest form: one thread for each row of Q, no shared memory.
//
// Read minimal_forward.cu first, then this file, then csrc/kernels/portable. Row j of Q processes its keys from the
// oldest to the newest. With g_i = A_i (dO_j . v_i), and with b as the sum of g over all older keys,
//
//     dz_i = (1 - beta_i) g_i - beta_i b
//     dq_j += scale dz_i k_i,    dk_i += scale dz_i q_j,    dv_i += A_i dO_j
//
// The first term is there because a larger beta_i gives key i more. The second term is there because it leaves less to
// every older key. b starts at P dP, where P is the mass that no key took and dP is its gradient, d_mass (null: 0).
//
// The order is from the oldest key because b must be an accurate sum. The other direction would start from the sum of
// all g, which is dO_j . o_j, and subtract. Every key with almost no weight would then get the rounding error of that
// sum as its gradient.
//
// The weights need the mass at each key. The row starts at the oldest key that the forward visited, with the mass in
// the restart record. It then undoes the forward one key at a time. If P is the mass on the older side of key i, the
// mass on its newer side is P / (1 - beta_i) = P + e_i P, without a division. The forward skipped all older keys, so
// they contribute 0.
//
// The tensors are those of minimal_forward.cu. dk and dv must be zero before the launch. Rows add to them with atomics,
// so two runs can differ in the last bits. The fast kernels give each key tile to one CTA instead, and their results
// are bitwise repeatable.
#include <cuda_runtime.h>

constexpr int kMaxHeadDim = 128;   // of q and k: each thread keeps dq_j in an array
constexpr float kMaxLogit = 80.f;  // as in the forward

struct Sizes {
    int batch, queries, keys, heads, kv_heads, d, d_v;
};

static __device__ float dot(const float* x, const float* y, int n) {
    float sum = 0.f;
    for (int c = 0; c < n; ++c) sum += x[c] * y[c];
    return sum;
}

__global__ void backward(Sizes s, const float* q, const float* k, const float* v, const float* d_o, const float* d_mass,
                         float scale, int attend_current, const float* mass, const int* restart_key,
                         const float* restart_mass, float* dq, float* dk, float* dv) {
    // Which row of Q this thread owns.
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= s.queries) return;
    const int head = blockIdx.y % s.heads, batch = blockIdx.y / s.heads;
    const int kv_head = head / (s.heads / s.kv_heads);
    const long long q_row = (long long)(batch * s.queries + j) * s.heads + head;
    const long long row = (long long)(batch * s.heads + head) * s.queries + j;
    const float *const q_j = q + q_row * s.d, *const dO_j = d_o + q_row * s.d_v;

    const int num_keys = s.keys - s.queries + j + attend_current;  // the causal mask
    const int oldest = restart_key[row];

    float dq_j[kMaxHeadDim] = {};
    float P = restart_mass[row];  // on the newer side of key `oldest`
    float b = d_mass == nullptr ? 0.f : mass[row] * d_mass[row];
    for (int i = oldest; i < num_keys; ++i) {
        const long long key = (long long)(batch * s.keys + i) * s.kv_heads + kv_head;
        const float *const k_i = k + key * s.d, *const v_i = v + key * s.d_v;
        const float e = expf(fminf(scale * dot(q_j, k_i, s.d), kMaxLogit));
        const float one_minus_beta = 1.f / (1.f + e), beta = e * one_minus_beta;
        if (i > oldest) P += e * P;  // from the older side of key i to its newer side

        const float A = beta * P;
        const float g = A * dot(dO_j, v_i, s.d_v);
        const float dz = one_minus_beta * g - beta * b;
        b += g;

        for (int c = 0; c < s.d; ++c) {
            dq_j[c] += scale * dz * k_i[c];
            atomicAdd(dk + key * s.d + c, scale * dz * q_j[c]);
        }
        for (int c = 0; c < s.d_v; ++c) atomicAdd(dv + key * s.d_v + c, A * dO_j[c]);
    }
    for (int c = 0; c < s.d; ++c) dq[q_row * s.d + c] = dq_j[c];
}

// Returns a cudaError_t; 0 is success. All pointers are device pointers; d_mass may be null.
extern "C" int minimal_backward(Sizes s, const float* q, const float* k, const float* v, const float* d_o,
                                const float* d_mass, float scale, int attend_current, const float* mass,
                                const int* restart_key, const float* restart_mass, float* dq, float* dk, float* dv,
                                cudaStream_t stream) {
    if (s.d > kMaxHeadDim) return cudaErrorInvalidValue;
    const int threads = 128;
    const dim3 blocks((s.queries + threads - 1) / threads, s.batch * s.heads);
    backward<<<blocks, threads, 0, stream>>>(s, q, k, v, d_o, d_mass, scale, attend_current, mass, restart_key,
                                             restart_mass, dq, dk, dv);
    return cudaGetLastError();
}
