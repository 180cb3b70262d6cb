"""Learning rates against their formulas, written out."""

import itertools
import math

import pytest

from megatron_sb.training.config import StageConfig
from megatron_sb.training.schedule import learning_rate


def stage(**fields):
    sizes = {"name": "a", "context_length": 64, "steps": 50, "rows_per_step": 4, "learning_rate": 3e-3}
    return StageConfig(**{**sizes, **fields})


def rates(stage):
    return [learning_rate(stage, step) for step in range(stage.steps)]


def test_context_extension_of_the_paper():
    """Appendix C.1: 150 steps from 1e-5 to 1.25e-4, then down to 0 at step 6250."""
    extension = stage(
        steps=6250, learning_rate=1.25e-4, warmup_start_rate=1e-5, warmup_steps=150, schedule="exponential"
    )
    found = rates(extension)
    step = (1.25e-4 - 1e-5) / 150
    assert found[:150] == pytest.approx([1e-5 + step * (n + 1) for n in range(150)], rel=1e-12)
    assert found[149] == pytest.approx(1.25e-4, rel=1e-12) and found[150] == pytest.approx(1.25e-4, rel=1e-12)
    assert found[150 + 6100 // 2] == pytest.approx(1.25e-4 * (math.sqrt(2) - 1), rel=1e-12)
    assert all(later < earlier for earlier, later in itertools.pairwise(found[150:]))
    assert 0 < found[-1] < 3e-8 and learning_rate(extension, 6250) == 0


@pytest.mark.parametrize("warmup", [0, 10])
def test_power_scheduler(warmup):
    """Shen et al., arXiv 2408.13359: min(ceiling, a * batch * tokens^-0.51), reached by a straight line."""
    found = rates(stage(schedule="power", power_coefficient=0.02, warmup_steps=warmup))
    law = [min(3e-3, 0.02 * 4 / ((n + 1) * 4 * 64) ** 0.51) for n in range(50)]
    assert len([rate for rate in law if rate == 3e-3]) in range(2, 40), "both sides of the minimum are to be seen"
    assert found[warmup:] == pytest.approx(law[warmup:], rel=1e-12)
    assert found[:warmup] == pytest.approx([law[warmup - 1] * (n + 1) / 10 for n in range(warmup)], rel=1e-12)


def test_power_from_the_end_of_the_warmup():
    found = rates(stage(schedule="power", warmup_steps=10))
    assert found[:10] == [3e-3 * (n + 1) / 10 for n in range(10)]
    assert found[10:] == pytest.approx([3e-3 * ((n + 1) / 10) ** -0.51 for n in range(10, 50)], rel=1e-12)


def test_constant():
    assert rates(stage(warmup_steps=2)) == [1.5e-3, *[3e-3] * 49]
