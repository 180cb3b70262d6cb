"""Megatron-Core as the engine of a training job. Only this package of the trainer imports it."""
