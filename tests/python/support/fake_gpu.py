"""Tensors that name a GPU as their device, to test without one what reads their values."""

import torch


class OnFakeGpu(torch.Tensor):
    """A tensor on a CPU that names a GPU as its device, and counts how often the host reads its values."""

    reads = 0

    @property
    def device(self):
        """Return a device other than the CPU."""
        return torch.device("cuda")

    def tolist(self):
        """Return the values."""
        OnFakeGpu.reads += 1
        return self.numpy().tolist()


def on_fake_gpu(x):
    """Return a tensor of this kind. No value of it has been read."""
    OnFakeGpu.reads = 0
    return x.as_subclass(OnFakeGpu)
