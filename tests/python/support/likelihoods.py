"""The likelihood of a run's held-out windows, computed from the logits of each window alone."""

import math

import numpy as np
import torch

from megatron_sb.training.documents import load_corpus
from megatron_sb.training.evaluate import choose_windows


def nll_of_windows(model, config, context):
    """Return the mean nats per target token at a context length. model: what `load_run` yields."""
    windows, num_targets = choose_windows(load_corpus(config), config), config.evaluation.target_tokens
    found = []
    for window in windows:
        tokens = torch.from_numpy(np.array(window[-context - 1 :])).long()
        logits = model.logits(tokens[:-1].tolist())
        assert logits.shape == (context, config.vocab_size)
        found.append(torch.nn.functional.cross_entropy(logits[-num_targets:].float(), tokens[-num_targets:]).item())
    return math.fsum(found) / len(found)
