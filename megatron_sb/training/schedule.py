"""The learning rate of every step of a stage."""

from __future__ import annotations

from megatron_sb.training.config import StageConfig

# Exponent of the power scheduler (Shen et al., arXiv 2408.13359), with which the models of Tan et al., appendix C.1,
# are pre-trained.
POWER_EXPONENT = -0.51


def learning_rate(stage: StageConfig, step: int) -> float:
    """The rate of step `step` (from 0): a linear warm-up from warmup_start_rate, then what the stage's schedule says.

    constant: stays at learning_rate. power: falls with (step / warmup_steps) ** -0.51; with power_coefficient a it is
    the power scheduler, min(learning_rate, a * rows * n ** -0.51) with n the stage's tokens so far and rows those of a
    step. exponential: 2 * 0.5**r - 1 with r the part of the decay that is over, Megatron's exponential tail, which
    reaches 0 where the stage ends.
    """
    if step >= stage.warmup_steps:
        return _after_warmup(stage, step)
    start, top = stage.warmup_start_rate, min(stage.learning_rate, _after_warmup(stage, stage.warmup_steps - 1))
    return start + (top - start) * (step + 1) / stage.warmup_steps


def _after_warmup(stage: StageConfig, step: int) -> float:
    if stage.schedule == "power" and stage.power_coefficient is not None:
        tokens = (step + 1) * stage.rows_per_step * stage.context_length
        return min(stage.learning_rate, stage.power_coefficient * stage.rows_per_step * tokens**POWER_EXPONENT)
    if stage.schedule == "power":
        return stage.learning_rate * ((step + 1) / stage.warmup_steps) ** POWER_EXPONENT
    if stage.schedule == "exponential":
        done = (step - stage.warmup_steps) / (stage.steps - stage.warmup_steps)
        return stage.learning_rate * (2 * 0.5**done - 1)
    return stage.learning_rate
