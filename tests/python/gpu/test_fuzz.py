"""2000 random calls with all options of the attention, and calls with few KV heads.

Each element of the results must be within its error bound.
"""

import pytest
import torch
from support.fuzz import Case, draw_case, judge
from support.memory import poison_free_memory

NUM_CASES, BATCHES = 2000, 20
PER_BATCH = NUM_CASES // BATCHES
MOST_SHOWN = 5


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_cases(batch, device):
    """Random cases match the reference. The message shows each failed case as Python source (see support/fuzz.py)."""
    failures = []
    for number in range(batch * PER_BATCH, (batch + 1) * PER_BATCH):
        case = draw_case(number)
        poison_free_memory(device)
        try:
            wrong = judge(case, device)
        except torch.AcceleratorError:  # the device is unusable after this error
            pytest.fail(f"the GPU failed in {case}", pytrace=True)
        except (RuntimeError, ValueError, TypeError) as error:
            wrong = [repr(error)]
        if wrong:
            failures.append(f"{case}\n    {'; '.join(wrong)}")
    shown = "\n".join(failures[:MOST_SHOWN])
    assert not failures, f"{len(failures)} of {PER_BATCH} cases are wrong:\n{shown}"


@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("form", "h", "h_kv", "rows"),
    [
        ("packed", 8, 1, (700, 300, 0, 1000)),
        ("packed", 2, 2, (1700, 500)),
        ("packed", 4, 1, (1100, 1100)),
        ("blocks", 8, 1, (1300,)),
        ("blocks", 1, 1, (1500,)),
    ],
)
def test_few_kv_heads(form, h, h_kv, rows, d, attend_current, device):
    """Several CTAs share a key tile of the Hopper backward: by query heads, by rows, or by both."""
    case = Case(
        form=form,
        dtype="bfloat16",
        b=1,
        h=h,
        h_kv=h_kv,
        d=d,
        d_v=d,
        lengths=tuple((s, s) for s in rows),
        beyond=40 if form == "packed" else 0,
        strides="contiguous",
        regime="mean -8",
        attend_current=attend_current,
        scale=1.0,
        mass_threshold=0.0,
        mass_in_loss=True,
        cuts=(0.3, 0.8) if form == "blocks" else (),
        carry=True,
        seed=0,
    )
    wrong = judge(case, device)
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["o", "mass", "dq", "dk", "dv"])
def test_judge_detects_one_wrong_element(name, device):
    """It detects an element that is wrong by a tenth, and an unwritten element, in each result."""

    def scaled(results):
        results[name].view(-1)[results[name].abs().argmax()] *= 1.1

    def unwritten(results):
        results[name].view(-1)[results[name].numel() // 2] = torch.nan

    cases = [case for case in map(draw_case, range(200)) if case.form == "dense" and case.dtype == "bfloat16"]
    for case in [case for case in cases if case.regime == "mean -11" and case.lengths[0][0] > 20][:3]:
        assert not judge(case, device)
        for mutate in (scaled, unwritten):
            wrong = judge(case, device, mutate)
            assert [text.partition(":")[0] for text in wrong] == [name], f"{case}: {mutate.__name__}"
