"""The learning rate of every step of a stage."""

from __future__ import annotations

from megatron_sb.config import StageConfig

# Exponent of the power scheduler (Shen et al., arXiv 2408.13359), with which the models of Tan et al., appendix C.1,
# are pre-trained.
POWER_EXPONENT = -0.51


def learning_rate(stage: StageConfig, step: int) -> float:
    """The rate of step `step` (from 0): a linear warm-up, then what the stage's schedule says.

    constant: stays at learning_rate. power: falls with (step / warmup_steps) ** -0.51. exponential: 2 * 0.5**r - 1
    with r the part of the decay that is over, Megatron's exponential tail, which reaches 0 where the stage ends.
    """
    if step < stage.warmup_steps:
        return stage.learning_rate * (step + 1) / stage.warmup_steps
    if stage.schedule == "power":
        return stage.learning_rate * ((step + 1) / stage.warmup_steps) ** POWER_EXPONENT
    if stage.schedule == "exponential":
        done = (step - stage.warmup_steps) / (stage.steps - stage.warmup_steps)
        return stage.learning_rate * (2 * 0.5**done - 1)
    return stage.learning_rate
