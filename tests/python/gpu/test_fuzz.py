"""2000 random calls with all options of the attention. Each element of the results must be within its error bound."""

import pytest
import torch
from support.fuzz import draw_case, judge
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
