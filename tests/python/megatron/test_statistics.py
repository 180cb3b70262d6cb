"""Statistics of a model's sticks, compared with the explicit attention matrix."""

import itertools

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from support.megatron_cpu import core_attention_arguments, packed_params, small_config

from megatron_sb.megatron import StickBreakingCoreAttention
from megatron_sb.megatron.statistics import TILE, observed, skipped_share, skipped_tiles

BOUNDS = (0, 70, 70, 300)


def masses_before(query, key, scale):
    """Mass of query j before key i, (h, rows, rows) float64, and the remaining mass (h, rows), in one document."""
    logits = scale * torch.einsum("jhd,ihd->hji", query.double(), key.double())
    rows = query.shape[0]
    keep = torch.sigmoid(-logits).masked_fill(~torch.ones(rows, rows, dtype=torch.bool).tril(-1), 1.0)
    newer = keep.flip(-1).cumprod(-1).flip(-1)  # product over key i and newer keys
    return torch.cat((newer[..., 1:], torch.ones_like(newer[..., :1])), -1), newer[..., 0]


def expected_counts(query, key, scale, bounds, threshold):
    """Count remainder, rows, skipped and tiles, tile by tile."""
    sums = [0.0, 0, 0, 0]
    for start, end in itertools.pairwise(sorted(set(bounds))):
        mass, left = masses_before(query[start:end], key[start:end], scale)
        sums[0] += left.sum().item()
        sums[1] += left.numel()
        for head in mass:
            for row in range(0, end - start, TILE):
                last = min(row + TILE, end - start) - 1
                num_tiles = -(-last // TILE)
                # A tile is skipped if no row reaches its newer edge with enough mass.
                reached = [head[row : last + 1, min((i + 1) * TILE, last + 1) - 1].max() for i in range(num_tiles)]
                sums[2] += sum(bool(mass < threshold) for mass in reached)
                sums[3] += num_tiles
    return sums


def test_layers_are_counted_by_themselves():
    """In the order of the modules, also if they run in another order."""
    cores = [StickBreakingCoreAttention(**core_attention_arguments(small_config())) for _ in range(2)]
    inputs = [torch.randn(rows, 1, 4, 8, generator=torch.Generator().manual_seed(rows)) for rows in (70, 300)]
    alone = []
    for core, x in zip(cores, inputs, strict=True):
        with observed(core, torch.device("cpu")) as counts:
            core(x, x, x, None)
        alone.append(counts.stack())
    with observed(torch.nn.ModuleList(cores), torch.device("cpu")) as counts:
        for core, x in reversed([*zip(cores, inputs, strict=True)]):
            core(x, x, x, None)
    assert torch.equal(counts.stack(), torch.cat(alone, 1)) and counts.rows.tolist() == [280, 1200]


@pytest.mark.parametrize("bounds", [(0, 300), BOUNDS])
@pytest.mark.parametrize("shift", [0.0, -1.5, -9.0])
def test_counts_equal_those_of_the_matrix(bounds, shift):
    core = StickBreakingCoreAttention(**core_attention_arguments(small_config()))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(300, heads, 8, generator=generator) for heads in (4, 4, 4))
    query[..., 0], key[..., 0] = 1.0, shift / core.scale
    packed = len(bounds) > 2
    params = packed_params(*bounds) if packed else None
    tensors = [x if packed else x[:, None] for x in (query, key, value)]
    with observed(torch.nn.ModuleList([core]), torch.device("cpu")) as counts:
        core(*tensors, None, packed_seq_params=params)
        core(*tensors, None, packed_seq_params=params)
    core(*tensors, None, packed_seq_params=params)
    found = (counts.stack()[:, 0] / 2).tolist()
    expected = expected_counts(query, key, core.scale, bounds, core.options.mass_threshold)
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-4)
    assert found[1:] == expected[1:]
    shares = skipped_share(core, *tensors, params)
    for head, share in enumerate(shares.tolist()):
        of_head = [x[:, head : head + 1] for x in (query, key)]
        _, _, skipped, tiles = expected_counts(*of_head, core.scale, bounds, core.options.mass_threshold)
        assert share == pytest.approx(skipped / tiles, rel=1e-12)
    assert expected[3] > 20 and (expected[2] > 0) == (shift > -9)


def test_rows_outside_documents_are_not_counted():
    edge = torch.arange(256, dtype=torch.int32).expand(1, 2, 256) // TILE * TILE
    skipped, tiles = skipped_tiles(edge, torch.tensor([0, 192]), attend_current=False)
    assert (skipped.item(), tiles.item()) == (2 * (0 + 0 + 1), 2 * (1 + 2 + 3))


def test_the_keys_of_a_cache_are_counted():
    """One query that follows 199 keys: it sees 4 tiles, and logits of 0 halve the mass at each key."""
    core = StickBreakingCoreAttention(**core_attention_arguments(small_config()))
    cache = torch.zeros(200, 1, 4, 8)
    with observed(core, torch.device("cpu")) as counts, torch.no_grad():
        core(cache[-1:], cache, cache, None, attn_mask_type=AttnMaskType.no_mask)
    assert counts.stack()[1:, 0].tolist() == [4, 4 * 2, 4 * 4]
    assert skipped_share(core, cache[-1:], cache, cache, None).tolist() == [0.5] * 4


@pytest.mark.parametrize(("rows", "batch"), [(0, 2), (5, 0)])
def test_calls_without_rows_count_nothing(rows, batch):
    core, x = StickBreakingCoreAttention(**core_attention_arguments(small_config())), torch.zeros(rows, batch, 4, 8)
    with observed(core, torch.device("cpu")) as counts:
        core(x, x, x, None)
    assert not counts.stack().any()
