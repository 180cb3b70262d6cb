"""Predict memory and speed of a training job by parallel layout (`megatron-sb plan`). Needs neither torch nor a GPU."""
