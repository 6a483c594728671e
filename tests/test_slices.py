"""A slice finds, measures, scales and writes just the entries that belong to its units."""

import copy
import pickle

import pytest
import torch

from pathprox.slices import Slice

CASES = {
    "rows": Slice("w", (6, 4), (0,), torch.arange(6), 6),
    "columns": Slice("w", (4, 6), (1,), torch.arange(6), 6),
    "channels": Slice("w", (5, 6, 3, 3), (1,), torch.arange(6), 6),
    "blocks": Slice("w", (3, 12), (1,), torch.arange(12) // 4, 3),
    "interleaved": Slice("w", (3, 12), (1,), torch.arange(12) % 3, 3),
    "some": Slice("w", (8, 3), (0,), torch.tensor([-1, 0, 1, -1, 0, 2, 1, 0]), 3),
    "grouped": Slice("w", (2, 3, 4, 3, 3), (0, 2), torch.arange(8), 8),
    "vector": Slice("b", (5,), (0,), torch.tensor([4, 3, 2, 1, 0]), 5),
}


@pytest.fixture(params=CASES)
def s(request):
    return CASES[request.param]


def entries(s: Slice, tensor: torch.Tensor, unit: int) -> torch.Tensor:
    """The slow way: position by position."""
    view = tensor.permute(*s.dims, *[d for d in range(tensor.dim()) if d not in s.dims])
    positions = view.reshape(len(s.owner), -1)
    return torch.cat([positions[i] for i in range(len(s.owner)) if s.owner[i] == unit])


def test_square_sums_and_gathered_rows(s):
    tensor = torch.randn(s.shape)
    sums, rows = s.square_sum(tensor), s.gather(tensor)
    for unit in range(s.units):
        mine = entries(s, tensor, unit)
        torch.testing.assert_close(sums[unit], mine.double().square().sum())
        assert torch.equal(rows[unit][: len(mine)], mine)
        assert (rows[unit][len(mine) :] == 0).all()
    torch.testing.assert_close(s.total(tensor.double().square()), sums)


def test_scaling_touches_its_units_alone(s):
    tensor = torch.randn(s.shape)
    before = tensor.clone()
    factor = torch.ones(s.units)
    factor[1] = 2.0
    s.scale_(tensor, factor)
    for unit in range(s.units):
        torch.testing.assert_close(entries(s, tensor, unit), entries(s, before, unit) * factor[unit])
    assert (tensor != before).sum() == len(entries(s, before, 1))


def test_writing_back_what_was_gathered_changes_nothing(s):
    tensor = torch.randn(s.shape)
    before = tensor.clone()
    s.write_(tensor, s.gather(tensor))
    assert torch.equal(tensor, before)
    s.write_(tensor, s.gather(before) * 3)
    for unit in range(s.units):
        torch.testing.assert_close(entries(s, tensor, unit), entries(s, before, unit) * 3)


def test_a_view_of_the_parameter_is_scaled_in_place():
    weight = torch.randn(6, 4, 3, 3)
    before = weight.clone()
    CASES["grouped"].scale_(weight, torch.full((8,), 2.0))
    torch.testing.assert_close(weight, before * 2)


def test_copies_and_pickles_are_equal(s):
    assert copy.deepcopy(s) == s
    assert pickle.loads(pickle.dumps(s)) == s
    assert s != Slice(s.name, s.shape, s.dims, s.owner.clone().fill_(-1), s.units)
    assert len({s, copy.deepcopy(s)}) == 1
