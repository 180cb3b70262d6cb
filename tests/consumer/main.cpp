// The smallest C++ program that uses the library: find_package(megatron_sb), no Python.
#include <ATen/ATen.h>
#include <megatron_sb/attention.h>

#include <iostream>

int main() {
    const at::Tensor q = at::randn({1, 128, 4, 64}), k = at::randn({1, 128, 2, 64}), v = at::ones({1, 128, 2, 64});
    const auto [o, mass] = megatron_sb::stickbreaking_attention(q, k, v);
    std::cout << (o.select(3, 0).transpose(1, 2) + mass - 1).abs().max().item<float>() << "\n";  // sum(A) + mass = 1
}
