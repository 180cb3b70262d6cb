// The reference of the kernel tests: the definition (Tan et al., eq. 1) and its derivative in float64, one query at a
// time.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace oracle {

using Vector = std::vector<double>;

struct Problem {
    int q_rows = 0, k_rows = 0, d = 0, d_v = 0;
    int q_pos_minus_k_pos = 0;
    bool attend_current = false;
    double scale = 1;
    Vector q, k, v, d_o;  // (rows, width)
    Vector d_mass;        // (q_rows)
};

struct Answer {
    Vector o, mass, dq, dk, dv;
};

inline double dot(const double* a, const double* b, int n) {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

// log(1 - sigmoid(z)) and log(sigmoid(z)) without overflow.
inline double log_kept(double z) {
    return -(std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z))));
}
inline double log_beta(double z) {
    return log_kept(-z);
}

inline Answer solve(const Problem& p) {
    Answer a{Vector(p.q_rows * p.d_v), Vector(p.q_rows), Vector(p.q_rows * p.d), Vector(p.k_rows * p.d),
             Vector(p.k_rows * p.d_v)};
    for (int j = 0; j < p.q_rows; ++j) {
        const int seen = std::min(p.k_rows, std::max(0, j + p.q_pos_minus_k_pos + (p.attend_current ? 1 : 0)));
        Vector z(seen), weight(seen), g(seen);
        double log_mass = 0;
        for (int i = seen - 1; i >= 0; --i) {
            z[i] = p.scale * dot(&p.q[j * p.d], &p.k[i * p.d], p.d);
            weight[i] = std::exp(log_beta(z[i]) + log_mass);
            log_mass += log_kept(z[i]);
        }
        a.mass[j] = std::exp(log_mass);
        double older = a.mass[j] * p.d_mass[j];
        for (int i = 0; i < seen; ++i) {
            g[i] = weight[i] * dot(&p.d_o[j * p.d_v], &p.v[i * p.d_v], p.d_v);
            const double dz = std::exp(log_kept(z[i])) * g[i] - std::exp(log_beta(z[i])) * older;
            older += g[i];
            for (int c = 0; c < p.d; ++c) {
                a.dq[j * p.d + c] += p.scale * dz * p.k[i * p.d + c];
                a.dk[i * p.d + c] += p.scale * dz * p.q[j * p.d + c];
            }
            for (int c = 0; c < p.d_v; ++c) {
                a.o[j * p.d_v + c] += weight[i] * p.v[i * p.d_v + c];
                a.dv[i * p.d_v + c] += weight[i] * p.d_o[j * p.d_v + c];
            }
        }
    }
    return a;
}

// Returns standard normal entries, except that the first component of all rows of q and k is constant. It gives the
// logits their mean.
inline Problem random_problem(int q_rows, int k_rows, int d, int d_v, double mean_logit, unsigned seed) {
    Problem p;
    p.q_rows = q_rows;
    p.k_rows = k_rows;
    p.d = d;
    p.d_v = d_v;
    p.q_pos_minus_k_pos = k_rows - q_rows;
    p.scale = 1 / std::sqrt(double(d));
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal;
    const auto fill = [&](Vector& x, int n) {
        x.resize(n);
        for (double& value : x) value = float(normal(generator));  // exactly representable in fp32
    };
    fill(p.q, q_rows * d);
    fill(p.k, k_rows * d);
    fill(p.v, k_rows * d_v);
    fill(p.d_o, q_rows * d_v);
    fill(p.d_mass, q_rows);
    const float shift = float(std::sqrt(std::abs(mean_logit) * std::sqrt(double(d))));
    for (int j = 0; j < q_rows; ++j) p.q[j * d] = shift;
    for (int i = 0; i < k_rows; ++i) p.k[i * d] = mean_logit < 0 ? -shift : shift;
    return p;
}

// Returns |got - want| / max(|want|, smallest) with Euclidean norms. If |want| is below `smallest`, for example because
// a mass underflowed, this is the absolute error in units of `smallest`.
inline double relative_error(const Vector& got, const Vector& want, double smallest = 1e-150) {
    double error = 0, size = 0;
    for (size_t i = 0; i < want.size(); ++i) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    return std::sqrt(error) / std::max(std::sqrt(size), smallest);
}

}  // namespace oracle
