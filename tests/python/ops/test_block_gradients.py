"""The backward of a block writes every gradient: nothing is left of what the memory of its outputs held before."""

import pytest
import torch
from support.accuracy import relative_errors
from support.bias_columns import read_gradients, with_biases
from support.inputs import make_inputs

import megatron_sb.ops  # noqa: F401 - loads torch.ops.megatron_sb

pytestmark = pytest.mark.usefixtures("device")  # uninitialised memory is full of NaN
ops = torch.ops.megatron_sb

GATE_COLUMNS = 8
PARTS = ("dq", "dk", "dv", "prefix")
# Of s rows and s_k keys: segments {q_begin, q_len, k_begin, k_len, q_pos_minus_k_pos}, or None for a dense call.
TABLES = {
    "dense": lambda s, s_k: None,
    "rows and keys in no segment": lambda s, s_k: [
        [10, s // 3, 20, s // 2, s // 6],
        [s // 2, s // 3, s // 2 + 70, s_k - s // 2 - 170, -30],
    ],
    "two segments with the same keys": lambda s, s_k: [[7, s // 4, 0, s // 2, 0], [s // 2, s // 4, 0, s_k - 9, 50]],
    "keys that no query sees": lambda s, s_k: [[0, s, 0, s_k, -s // 2]],
    "no pair of a query and a key": lambda s, s_k: [[0, s, 0, s_k, -s]],
    "no segments": lambda s, s_k: [],
}


def gradients(x, k, table, dtype, out_dtype, options):
    """Return dq, dk, dv and the prefix of a block whose carries are not trivial, computed in `dtype`."""
    q, k, v, do = (t.to(dtype) for t in (x.q, k, x.v, x.do))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    d_mass, mass_in = x.dmass.to(wide), x.dmass.sigmoid().to(wide)
    segments = None if table is None else torch.tensor(table, dtype=torch.int32, device=q.device).reshape(-1, 5)
    _, mass, edge, restart = ops.block_forward(q, k, v, segments, mass_in, **options)
    return ops.block_backward(
        do, q, k, v, segments, edge, restart, None, mass * d_mass, out_dtype=out_dtype or wide, **options
    )


@pytest.mark.parametrize(
    ("dtype", "d", "d_v", "variants", "s", "h", "h_kv"),
    [
        (torch.bfloat16, 64, 64, "", 700, 4, 2),
        (torch.float16, 64, 40, "gated", 700, 4, 2),
        (torch.bfloat16, 72, 64, "biased", 700, 4, 2),
        (torch.float16, 72, 64, "biased gated", 700, 4, 2),
        (torch.bfloat16, 96, 96, "gated", 700, 4, 2),
        (torch.bfloat16, 128, 128, "", 700, 4, 2),
        (torch.bfloat16, 128, 128, "gated", 700, 4, 2),
        (torch.bfloat16, 136, 128, "biased gated", 700, 4, 2),
        (torch.float16, 136, 128, "biased", 700, 8, 1),
        (torch.bfloat16, 192, 128, "", 700, 4, 2),
        (torch.float16, 256, 256, "", 700, 4, 2),
        (torch.float32, 64, 64, "gated", 700, 4, 2),
        # Several CTAs for a key tile: ranges of heads, ranges of rows.
        (torch.bfloat16, 64, 64, "gated", 700, 8, 1),
        (torch.bfloat16, 128, 128, "gated", 700, 8, 1),
        (torch.bfloat16, 128, 128, "", 2000, 2, 2),
        (torch.bfloat16, 192, 128, "", 700, 8, 1),
    ],
)
def test_every_gradient_is_written(dtype, d, d_v, variants, s, h, h_kv):
    """Gradients are those of the same call in float64 on a CPU. Rows and keys that take part in nothing get 0."""
    s_k, gated, biased = s + 200, "gated" in variants, "biased" in variants
    x = make_inputs("mean -3.2", s=s, s_k=s_k, h=h, h_kv=h_kv, d=d, d_v=d_v, dtype=dtype)
    if biased:
        x = with_biases(x)
    k = x.k
    if gated:
        gates = (torch.rand(1, s_k, h_kv, 1) / 2 + 0.5).to(dtype)
        k = torch.cat([k, torch.nn.functional.pad(gates, (0, GATE_COLUMNS - 1))], -1)

    def compared(found):
        named = dict(zip(PARTS, found, strict=True))
        return (read_gradients(named, d) if biased else named).values()

    options = {"scale": d**-0.5, "mass_threshold": 0.0, "forget_gate": gated, "bias_columns": biased}
    on_cpu = type(x)(*(t.cpu() for t in vars(x).values()))
    for name, table_of in TABLES.items():
        table = table_of(s, s_k)
        results = {out_dtype: gradients(x, k, table, dtype, out_dtype, options) for out_dtype in {None, dtype}}
        oracle = gradients(on_cpu, k.cpu(), table, torch.float64, None, options)
        for found in results.values():
            assert all(part.isfinite().all() for part in found), name
            for part, a, e in zip(PARTS, *map(compared, (found, oracle)), strict=True):
                where = f"{name}, {part}, {a.dtype}"
                assert not a.cpu()[e == 0].any(), where
                assert max(relative_errors(a.cpu(), e)) <= (1e-5 if dtype == torch.float32 else 2**-6), where
