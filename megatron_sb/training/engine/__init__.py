"""Megatron-Core as the engine of a training job: the one place of the trainer that imports it."""
