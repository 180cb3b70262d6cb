"""Whether a tensor still holds the values that the host has read, without a wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class Snapshot:
    """Keep a copy of a tensor from which the host derives a result, and detect that the result is out of date.

    torch counts the writes of its operators. It does not count writes by collectives, CUDA graphs and kernels of other
    libraries, and writes through `.data` and to inference tensors.

    Args:
        name: name of the tensor in the error.
        tensor: the tensor. Derive the result from the attribute `values`, not from the tensor.

    Attributes:
        values: the copy.

    Example:
        >>> import torch
        >>> from megatron_sb.ops.snapshot import Snapshot
        >>> offsets = torch.tensor([0, 4, 8])
        >>> snapshot = Snapshot("offsets", offsets)
        >>> snapshot.is_current(offsets)
        True
        >>> offsets.data[1] = 5
        >>> snapshot.is_current(offsets)
        False
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.values = tensor.detach().clone()
        self._version = None if tensor.is_inference() else tensor._version
        self._error = (
            f"{name} was changed by a write that torch does not count, such as that of a collective or of a CUDA "
            "graph. Pass a new tensor for each batch, or keep it on the CPU."
        )

    def is_current(self, tensor: Tensor) -> bool:
        """Return whether the tensor, of which this is a snapshot, still holds the values.

        On a CPU, the values are compared. On a GPU, the result is whether torch has counted a write since, and the
        device compares the values later. If they differ there, the device stops with a device-side assertion, which
        prints the error. The comparison is a part of a CUDA graph that captures it.
        """
        if tensor.device.type == "cpu":
            return torch.equal(tensor, self.values)
        if self._version is None or tensor._version != self._version:
            return False
        # The copy is complete: the host has read it. The allocator must not reuse its memory before this comparison.
        torch._assert_async((tensor == self.values).all(), self._error)
        if self.values.is_cuda:
            self.values.record_stream(torch.cuda.current_stream(self.values.device))
        return True
