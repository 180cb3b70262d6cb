"""Results that the host derives from a GPU tensor, after a write that torch does not count: never a wrong answer."""

import os
import subprocess
import sys

import pytest
import torch
from support.cuda import no_synchronisation

from megatron_sb.baselines.softmax.offsets import LastOffsets

START = """if True:
    import torch
    import torch.distributed as dist
    from megatron_sb.baselines.softmax.offsets import LastOffsets
    offsets = torch.tensor([0, 2, 8], dtype=torch.int32, device="cuda")
"""
USES = {
    "softmax baseline": """
    last = LastOffsets()
    use = lambda: last.lengths(offsets, 8)
""",
    "Megatron-Core": """
    from megatron_sb.megatron.plans import PlanCache
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cache, sizes = PlanCache(), {"local_len": 8, "layout": "contiguous", "packing": "whole_stream"}
    use = lambda: cache.get(dist.group.WORLD, cu_seqlens=offsets, **sizes)
""",
    "transformers": """
    from megatron_sb.huggingface.packing import document_mask
    use = lambda: document_mask(None, offsets, (1, 8))
""",
}
WRITES = {
    "through data": """
    use()
    offsets.data[1] = 5
    use()
""",
    "in a graph": """
    use()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    source = offsets.clone()
    with torch.cuda.graph(graph, stream=stream):
        offsets.copy_(source)
    version = offsets._version
    use()  # the capture counted a write
    torch.cuda.synchronize()
    print("no error yet", flush=True)
    source[1] = 5
    graph.replay()
    assert offsets._version == version
    use()
""",
}
END = """
    torch.cuda.synchronize()
    print("not detected", flush=True)
"""


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("user", USES)
def test_the_device_stops(user, write, tmp_path):
    """A device-side assertion ends the use of the GPU, so another process runs it."""
    if user == "Megatron-Core":
        pytest.importorskip("megatron.core")
    if user == "transformers":
        pytest.importorskip("transformers")
    code = START + USES[user] + WRITES[write] + END
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ("no error yet" in done.stdout) == (write == "in a graph"), done.stdout + done.stderr[-4000:]
    assert done.returncode != 0 and "not detected" not in done.stdout, done.stdout + done.stderr[-4000:]
    assert "was changed by a write that torch does not count" in done.stdout + done.stderr
    assert "device-side assert" in done.stderr


def test_other_layers_do_not_wait_for_the_device():
    """They enqueue the comparison, also on another stream."""
    last, offsets = LastOffsets(), torch.tensor([0, 2, 8], dtype=torch.int32)
    last.lengths(offsets, 8)
    with no_synchronisation(), torch.cuda.stream(torch.cuda.Stream()):
        assert last.lengths(offsets, 8) == (2, 6)
    torch.cuda.synchronize()
