"""Stick-breaking attention in place of softmax attention, dense and packed.

python examples/attention.py
"""

import torch

import megatron_sb as sb


def main() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 1024, 8, 64, requires_grad=True)  # (batch, positions, heads, head_dim)
    k = torch.randn(2, 1024, 2, 64, requires_grad=True)  # two key heads serve eight query heads
    v = torch.randn(2, 1024, 2, 64, requires_grad=True)

    out, mass = sb.stickbreaking_attention(q, k, v, return_mass=True)
    out.square().mean().backward()
    print("dense:  out", tuple(out.shape), "mass", tuple(mass.shape), "dk", tuple(k.grad.shape))

    # Three documents of 700, 24 and 300 positions in one row, none of which sees another.
    cu_seqlens = torch.tensor([0, 700, 724, 1024], dtype=torch.int32)
    packed = sb.stickbreaking_attention_varlen(q[0], k[0], v[0], cu_seqlens)
    alone = sb.stickbreaking_attention(q[:1, 700:724], k[:1, 700:724], v[:1, 700:724])
    print(
        "packed: out",
        tuple(packed.shape),
        "the second document alone differs by",
        float((packed[700:724] - alone).detach().abs().max()),
    )


if __name__ == "__main__":
    main()
