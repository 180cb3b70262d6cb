"""Call stick-breaking attention on dense and on packed sequences.

python examples/attention.py
"""

import torch

import megatron_sb as sb


def main() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 1024, 8, 64, requires_grad=True)  # (batch, tokens, heads, head_dim)
    k = torch.randn(2, 1024, 2, 64, requires_grad=True)  # 2 KV heads for 8 query heads
    v = torch.randn(2, 1024, 2, 64, requires_grad=True)

    out, mass = sb.stickbreaking_attention(q, k, v, return_mass=True)
    out.square().mean().backward()
    print("dense:  out", tuple(out.shape), "mass", tuple(mass.shape), "dk", tuple(k.grad.shape))

    # One row with three documents of 700, 24 and 300 tokens. No document attends to another.
    cu_seqlens = torch.tensor([0, 700, 724, 1024], dtype=torch.int32)
    packed = sb.stickbreaking_attention_varlen(q[0], k[0], v[0], cu_seqlens)
    alone = sb.stickbreaking_attention(q[:1, 700:724], k[:1, 700:724], v[:1, 700:724])
    print(
        "packed: out",
        tuple(packed.shape),
        "largest difference from the second document alone",
        float((packed[700:724] - alone).detach().abs().max()),
    )


if __name__ == "__main__":
    main()
