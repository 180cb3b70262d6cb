"""The learning-rate schedules."""

from __future__ import annotations

from megatron_sb.training.config import StageConfig

# Exponent of the power scheduler (Shen et al., arXiv 2408.13359). Tan et al., appendix C.1, pre-train with it.
POWER_EXPONENT = -0.51


def learning_rate(stage: StageConfig, step: int) -> float:
    """Return the learning rate of step `step` (from 0): a linear warm-up from warmup_start_rate, then the schedule.

    The schedules, with n the stage's tokens so far and r the finished part of the decay, from 0 to 1:

    - constant: learning_rate.
    - power: learning_rate * (step / warmup_steps) ** -0.51. With power_coefficient a, the power scheduler:
      min(learning_rate, a * rows_per_step * n ** -0.51).
    - exponential: learning_rate * (2 * 0.5 ** r - 1), Megatron's exponential tail, which ends at 0.
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
