"""Load checkpoints of Megatron's distributed optimizer without Transformer Engine and Apex, when it runs torch's AdamW.

torch's AdamW keeps the number of steps in a tensor for each parameter, and makes that tensor in its first step.
Megatron-Core (0.16, 0.19) saves one number for all parameters, but cannot load it:

- It reads the number from an optimizer that has not made a step, which has none.
- It copies all tensors of a parameter from the checkpoint, which has no tensor for the number. In the format
  "dp_reshardable" it copies the number from before the load.
- It gives all parameters the same tensor. Each parameter would then count the steps of all.
- In fp32 and in the format "dp_reshardable" it writes into parameters for which torch records operations.

`load_step_counts` mends this. `stand_ins.install_stand_ins` calls it.
"""

from __future__ import annotations

import functools

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

# Settings with which a step on zero gradients changes no parameter.
_NO_CHANGE = {"lr": 0.0, "weight_decay": 0.0, "eps": 1.0}


def load_step_counts() -> None:
    """Let the distributed optimizer load the step count in this process. Call this function once.

    With Transformer Engine or Apex it has no effect.
    """
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    stock_save = DistributedOptimizer.state_dict
    stock_load = DistributedOptimizer.load_state_dict
    stock_set = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(stock_save)
    def state_dict(self):
        if _is_adam(self.optimizer) and not self.optimizer.state:
            _allocate_state(self.optimizer)
        return stock_save(self)

    @functools.wraps(stock_load)
    def load_state_dict(self, state_dict):
        stock_load(self, state_dict)
        if _is_adam(self.optimizer):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    @functools.wraps(stock_set)
    def set_states(self, model_param, tensors):
        if _is_adam(self.optimizer):
            group, place = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
            tensors = {**tensors, "step": state["step"]}  # load_state_dict has set it
        with torch.no_grad():
            stock_set(self, model_param, tensors)

    DistributedOptimizer.state_dict = state_dict
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def _is_adam(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an Adam the state that it has before its first step. Parameters, gradients and settings do not change."""
    groups = optimizer.param_groups
    settings = [{name: group[name] for name in _NO_CHANGE} for group in groups]
    gradients = [(parameter, parameter.grad) for group in groups for parameter in group["params"]]
    for group in groups:
        group.update(_NO_CHANGE)
    for parameter, _ in gradients:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, gradient in gradients:
        parameter.grad = gradient
    for group, values in zip(groups, settings, strict=True):
        group.update(values)
    for state in optimizer.state.values():
        state["step"].zero_()
