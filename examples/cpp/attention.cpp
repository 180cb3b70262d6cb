// Stick-breaking attention in a C++ program, without Python. CMakeLists.txt says how to build it.
//
// The weights of a query and its mass sum to 1. With v = 1 the output is the sum of the weights, so the program prints
// the largest difference |o + mass - 1|, a rounding error.
#include <ATen/ATen.h>
#include <megatron_sb/attention.h>

#include <iostream>

int main() {
    const at::Tensor q = at::randn({1, 128, 4, 64});  // (b, s, h, d)
    const at::Tensor k = at::randn({1, 128, 2, 64});  // (b, s, h_kv, d): two query heads read each KV head
    const at::Tensor v = at::ones({1, 128, 2, 64});   // (b, s, h_kv, d_v)

    const auto [o, mass] = megatron_sb::stickbreaking_attention(q, k, v);  // o (b, s, h, d_v), mass (b, h, s)

    const at::Tensor sum_of_weights = o.select(3, 0).transpose(1, 2);  // (b, h, s)
    std::cout << (sum_of_weights + mass - 1).abs().max().item<float>() << "\n";
}
